"""Turns tokens into text as they come: whole characters only, stop strings seen on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet."""

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text, skipping special tokens."""


class Detokenizer:
    """Decodes a growing token list piece by piece.

    A window of the latest tokens is decoded again with each token, since a token's text may depend
    on its neighbours (a character of several tokens, a word's leading space); text at the window's
    end that may still change is held back.

    Invariant: the pieces given so far are a prefix of the text of all tokens; with `finish` they
    are equal to it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        # Tokens before the window are done with. The window begins one settled piece early, as
        # context of the next one.
        self._window_start = 0
        self._settled_end = 0
        self._given_length = 0

    def add(self, token_id: int) -> str:
        """Takes one token; returns the text that is certain now, possibly none."""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids[self._window_start :])
        certain = text.rstrip(REPLACEMENT_CHARACTER)
        piece = certain[self._given_length :]
        self._given_length = max(self._given_length, len(certain))
        if certain == text and piece:
            self._window_start = self._settled_end
            self._settled_end = len(self._token_ids)
            self._given_length = len(self._decode(self._token_ids[self._window_start :]))
        return piece

    def finish(self) -> str:
        """What was held back: no further token will come."""
        text = self._decode(self._token_ids[self._window_start :])
        piece = text[self._given_length :]
        self._given_length = len(text)
        return piece


@dataclass(frozen=True, slots=True)
class StopScan:
    """Text that may be given out, and the stop string that ended it, where one did."""

    text: str
    stop_string: str | None


class StopScanner:
    """Looks for stop strings in text that comes in pieces.

    The stop string that is complete first wins, the longest of several; so how the text was cut
    into pieces changes nothing. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "a stop string holds a character"
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def add(self, piece: str) -> StopScan:
        """Takes more text."""
        text = self._held + piece
        hits = [
            (start + len(stop), start, stop)
            for stop in self._stop_strings
            if (start := text.find(stop)) >= 0
        ]
        if hits:
            _, start, stop = min(hits)
            self._held = ""
            return StopScan(text[:start], stop)
        held_length = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        end = len(text) - held_length
        self._held = text[end:]
        return StopScan(text[:end], None)

    def finish(self) -> str:
        """What was held back: no further text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
