"""Text in pieces equals the text of the whole; stop strings do not depend on the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.worker.detokenizer import REPLACEMENT_CHARACTER, Detokenizer, StopScanner


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer's decoder: one token per byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """A decoder whose text depends on neighbours: the first word has no space before it."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def pieces_of(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token releases, and what the end does."""
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def test_characters_of_several_tokens_come_whole() -> None:
    """Bytes of one character are held back until it is complete."""
    pieces = pieces_of(Detokenizer(decode_bytes), "a€😀b".encode())

    assert [p for p in pieces if p] == ["a", "€", "😀", "b"]


@given(st.binary(max_size=40))
def test_any_bytes_come_out_as_they_decode_at_once(data: bytes) -> None:
    """The pieces together are the text of all tokens, valid or not."""
    assert "".join(pieces_of(Detokenizer(decode_bytes), data)) == decode_bytes(data)


@given(st.text(max_size=30).filter(lambda text: REPLACEMENT_CHARACTER not in text))
def test_no_piece_of_valid_text_holds_half_a_character(text: str) -> None:
    """A replacement character never stands for one that was still on its way."""
    pieces = pieces_of(Detokenizer(decode_bytes), text.encode())

    assert not any(REPLACEMENT_CHARACTER in piece for piece in pieces)
    assert "".join(pieces) == text


@given(st.lists(st.integers(min_value=0, max_value=20), max_size=20))
def test_text_that_depends_on_its_neighbours_comes_out_right(token_ids: list[int]) -> None:
    """A decoder that trims the first word's space gives the same text piece by piece."""
    assert "".join(pieces_of(Detokenizer(decode_words), token_ids)) == decode_words(token_ids)


def test_a_real_replacement_character_comes_at_the_end() -> None:
    """A model may well write U+FFFD: it is held back, not lost."""
    assert "".join(pieces_of(Detokenizer(decode_bytes), "x\ufffd".encode())) == "x\ufffd"


def scan(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """The text given out, and the stop string that ended it."""
    scanner = StopScanner(stops)
    text = ""
    for piece in pieces:
        result = scanner.add(piece)
        text += result.text
        if result.stop_string is not None:
            return text, result.stop_string
    return text + scanner.finish(), None


def test_stop_string_across_pieces_is_found_and_left_out() -> None:
    """The text ends before the stop string, of which nothing was given out early."""
    scanner = StopScanner(["END"])

    assert scanner.add("one E").text == "one "
    assert scanner.add("N").text == ""
    found = scanner.add("D two")

    assert (found.text, found.stop_string) == ("", "END")


def test_beginning_of_a_stop_string_that_does_not_come_is_given_out() -> None:
    """Text held back is not lost when it turns out to be no stop string."""
    assert scan(["END"], ["one E", "Nough"]) == ("one ENough", None)
    assert scan(["END"], ["one E", "N"]) == ("one EN", None)


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_cuts_change_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    """The same text in pieces of any size ends at the same place, by the same stop string."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]

    assert scan(stops, pieces) == scan(stops, list(text))


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["bc", "abcd"], ("a", "bc")), (["b", "ab"], ("", "ab"))],
)
def test_first_complete_stop_string_wins(
    stops: list[str], expected: tuple[str, str | None]
) -> None:
    """Of several, the one that is complete first; of those, the longest."""
    assert scan(stops, ["abcd"]) == expected
