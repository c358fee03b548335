"""What prompt lookup guesses."""

from __future__ import annotations

from prefixd.worker.speculation import PromptLookup


def lookup(*, draft_token_count_max: int = 4, token_count_end: int = 1_000) -> PromptLookup:
    """A lookup with room."""
    return PromptLookup(
        draft_token_count_max=draft_token_count_max, token_count_end=token_count_end
    )


def test_what_followed_the_last_tokens_is_guessed() -> None:
    """Behind 1 2 3 stood 4 5 6 7 before."""
    assert lookup().propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]) == (4, 5, 6, 7)


def test_longer_runs_win_over_later_ones() -> None:
    """Three equal tokens say more than two, even if the two stood later."""
    assert lookup(draft_token_count_max=1).propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == (9,)


def test_latest_occurrence_wins() -> None:
    """Of equal runs the last one is taken."""
    assert lookup(draft_token_count_max=1).propose([1, 2, 8, 1, 2, 9, 0, 1, 2]) == (9,)


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    """New tokens have no past."""
    assert lookup().propose([1, 2, 3, 4]) == ()
    assert lookup().propose([1]) == ()


def test_guesses_keep_growing_with_the_tokens() -> None:
    """A lookup that saw the beginning sees what came since."""
    one = lookup(draft_token_count_max=2)
    assert one.propose([1, 2, 3]) == ()
    assert one.propose([1, 2, 3, 1, 2]) == (3, 1)


def test_a_short_piece_is_guessed_to_repeat_itself() -> None:
    """Behind 5 6 5 6 comes 5 6 again and again."""
    assert lookup().propose([9, 5, 6, 5, 6]) == (5, 6, 5, 6)


def test_no_guess_stands_behind_the_end() -> None:
    """The last wanted token is never computed, so it is never a guess."""
    tokens = [1, 2, 3, 4, 1, 2]
    assert lookup(token_count_end=9).propose(tokens) == (3, 4)
    assert lookup(token_count_end=7).propose(tokens) == ()
