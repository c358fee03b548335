"""Prompt lookup: guesses the next tokens from what followed the same few tokens earlier.

Source: prompt lookup decoding (Saxena, 2023): an answer often repeats pieces of its prompt, and a
pass that checks several guesses costs little more than one that computes a single token.
"""

from collections.abc import Sequence

NGRAM_LENGTHS = (3, 2)
"""How many last tokens are looked up, the longest first."""


class PromptLookup:
    """Guesses for one growing token list.

    Invariant: every run of ``NGRAM_LENGTHS`` tokens that ends before the last token seen is indexed
    by the position behind its latest occurrence.
    """

    def __init__(self, *, draft_token_count_max: int, token_count_end: int) -> None:
        """Begins with nothing seen.

        Args:
            draft_token_count_max: most tokens of a guess.
            token_count_end: tokens of the finished sequence: none is guessed that could not stand
                in it.
        """
        self._draft_token_count_max = draft_token_count_max
        self._token_count_end = token_count_end
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed_end = 0

    def another(self) -> "PromptLookup":
        """One for another token list, with the same bounds."""
        return PromptLookup(
            draft_token_count_max=self._draft_token_count_max,
            token_count_end=self._token_count_end,
        )

    def propose(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Guesses what follows; none where the last tokens never stood before.

        Args:
            token_ids: all tokens so far; those given before have not changed.
        """
        self._index(token_ids)
        # Of the last token that is wanted no KV is computed, so it is never a guess.
        room = self._token_count_end - len(token_ids) - 1
        count = min(self._draft_token_count_max, room)
        if count < 1:
            return ()
        for length in NGRAM_LENGTHS:
            end = self._ends.get(tuple(token_ids[-length:]))
            if end is not None:
                # What follows may reach the end: then the piece behind it repeats itself.
                period = len(token_ids) - end
                return tuple(token_ids[end + index % period] for index in range(count))
        return ()

    def _index(self, token_ids: Sequence[int]) -> None:
        for end in range(self._indexed_end + 1, len(token_ids)):
            for length in NGRAM_LENGTHS:
                if end >= length:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._indexed_end = max(self._indexed_end, len(token_ids) - 1)
