"""One answer while it is generated: its tokens become text parts, and it knows when it is over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

from prefixd.worker.detokenizer import Detokenizer, StopScanner
from prefixd.worker.errors import WorkerError
from prefixd.worker.sampling import SamplingOptions
from prefixd.worker.sequence import Sequence


class FinishReason(Enum):
    """Why an answer ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_STRING = "stop_string"
    TOKEN_COUNT_MAX = "token_count_max"
    CONTEXT_LENGTH = "context_length"


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """When an answer is over.

    Attributes:
        token_count_max: most tokens to generate.
        reason_at_max: what it is called when they are generated.
        end_token_ids: tokens that end the answer and are not part of it; empty: none does.
        stop_strings: strings that end the answer and are not part of its text.
    """

    token_count_max: int
    reason_at_max: FinishReason
    end_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence runs; so many tokens of its prompt were reused."""

    cached_token_count: int


@dataclass(frozen=True, slots=True)
class TextChunk:
    """More of the answer."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason
    stop_string: str
    cached_token_count: int
    generated_token_count: int
    block_count: int
    time_to_first_token_s: float
    decode_tokens_per_second: float
    preemption_count: int


Part = Started | TextChunk | Finished


class Answer:
    """The answer that grows behind a sequence's prompt.

    The engine feeds it; one consumer reads its parts. Invariant: after `Finished` or a failure no
    part follows.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingOptions,
        limits: AnswerLimits,
        detokenizer: Detokenizer,
        *,
        arrival_s: float,
    ) -> None:
        self.sequence = sequence
        self.sampling = sampling
        self._limits = limits
        self._detokenizer = detokenizer
        self._scanner = StopScanner(limits.stop_strings)
        self._parts: asyncio.Queue[Part | WorkerError] = asyncio.Queue()
        self._cached_token_count = 0
        self._generated_token_count = 0
        self._arrival_s = arrival_s
        self._first_token_s = arrival_s
        self._last_token_s = arrival_s
        self._is_over = False

    def start(self, *, cached_token_count: int) -> None:
        """The sequence was opened for the first time."""
        self._cached_token_count = cached_token_count
        self._parts.put_nowait(Started(cached_token_count))

    def take(self, token_id: int, *, now_s: float) -> FinishReason | None:
        """Takes the next token; returns why the answer is over, if it is.

        A token that goes on is appended to the sequence.
        """
        if self._generated_token_count == 0:
            self._first_token_s = now_s
        if token_id in self._limits.end_token_ids:
            return self._finish(FinishReason.END_OF_SEQUENCE)
        self._last_token_s = now_s
        self._generated_token_count += 1
        self.sequence.token_ids.append(token_id)
        scan = self._scanner.add(self._detokenizer.add(token_id))
        self._parts.put_nowait(TextChunk(scan.text, (token_id,)))
        if scan.stop_string is not None:
            return self._put_finished(FinishReason.STOP_STRING, scan.stop_string)
        if self._generated_token_count >= self._limits.token_count_max:
            return self._finish(self._limits.reason_at_max)
        return None

    def fail(self, error: WorkerError) -> None:
        """Ends the answer with an error; does nothing if it is over."""
        if not self._is_over:
            self._is_over = True
            self._parts.put_nowait(error)

    async def parts(self) -> AsyncIterator[Part]:
        """The parts as they come, `Finished` last.

        Raises:
            WorkerError: the answer failed.
        """
        while True:
            part = await self._parts.get()
            if isinstance(part, WorkerError):
                raise part
            yield part
            if isinstance(part, Finished):
                return

    def _finish(self, reason: FinishReason) -> FinishReason:
        # What the detokenizer held back may yet complete a stop string.
        scan = self._scanner.add(self._detokenizer.finish())
        text = scan.text if scan.stop_string is not None else scan.text + self._scanner.finish()
        if text:
            self._parts.put_nowait(TextChunk(text, ()))
        if scan.stop_string is not None:
            return self._put_finished(FinishReason.STOP_STRING, scan.stop_string)
        return self._put_finished(reason, "")

    def _put_finished(self, reason: FinishReason, stop_string: str) -> FinishReason:
        self._is_over = True
        later_token_count = max(0, self._generated_token_count - 1)
        decode_s = self._last_token_s - self._first_token_s
        self._parts.put_nowait(
            Finished(
                reason=reason,
                stop_string=stop_string,
                cached_token_count=self._cached_token_count,
                generated_token_count=self._generated_token_count,
                block_count=len(self.sequence.block_ids),
                time_to_first_token_s=self._first_token_s - self._arrival_s,
                decode_tokens_per_second=later_token_count / decode_s if decode_s > 0 else 0.0,
                preemption_count=self.sequence.preemption_count,
            )
        )
        return reason
