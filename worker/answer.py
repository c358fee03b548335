"""One answer while it is generated: its tokens become text parts, and it knows when it is over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

from prefixd.worker.detokenizer import Detokenizer, StopScanner
from prefixd.worker.errors import WorkerError
from prefixd.worker.sampling import Draw, SamplingOptions
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

    sequence_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    cached_token_count: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural logarithms of the probabilities of the prompt's tokens, from the second one on."""

    logprobs: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """More of the answer."""

    text: str
    token_ids: tuple[int, ...]
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; ``score`` is that of a beam search's hypothesis."""

    sample_index: int
    reason: FinishReason
    stop_string: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    block_count: int
    time_to_first_token_s: float
    decode_tokens_per_second: float
    preemption_count: int
    draft_token_count: int = 0
    accepted_draft_token_count: int = 0
    score: float | None = None


Part = Started | PromptLogprobs | TextChunk | Finished


class PartStream:
    """The parts of all answers to one request, on their way to the one consumer.

    Invariant: after a `Finished` of each answer, or a failure, no part follows.
    """

    def __init__(self, *, answer_count: int) -> None:
        self._unfinished_count = answer_count
        self._parts: asyncio.Queue[Part | WorkerError] = asyncio.Queue()

    @property
    def is_over(self) -> bool:
        """Whether no part can follow."""
        return self._unfinished_count == 0

    def put(self, part: Part) -> None:
        """Sends a part."""
        assert not self.is_over, "the stream has ended"
        if isinstance(part, Finished):
            self._unfinished_count -= 1
        self._parts.put_nowait(part)

    def fail(self, error: WorkerError) -> None:
        """Ends the stream with an error; does nothing if it is over."""
        if not self.is_over:
            self._unfinished_count = 0
            self._parts.put_nowait(error)

    async def parts(self) -> AsyncIterator[Part]:
        """The parts as they come.

        Raises:
            WorkerError: the answers failed.
        """
        while not (self.is_over and self._parts.empty()):
            part = await self._parts.get()
            if isinstance(part, WorkerError):
                raise part
            yield part


class Answer:
    """The answer that grows behind a sequence's prompt.

    It is fed token by token and sends its parts. Invariant: it takes nothing after its end.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingOptions,
        limits: AnswerLimits,
        detokenizer: Detokenizer,
        stream: PartStream,
        *,
        arrival_s: float,
        sample_index: int = 0,
    ) -> None:
        self.sequence = sequence
        self._sampling = sampling
        self._limits = limits
        self._detokenizer = detokenizer
        self._stream = stream
        self._scanner = StopScanner(limits.stop_strings)
        self._sample_index = sample_index
        self._cached_token_count = 0
        self._generated_token_count = 0
        self._draft_token_count = 0
        self._accepted_draft_token_count = 0
        self._arrival_s = arrival_s
        self._first_token_s = arrival_s
        self._last_token_s = arrival_s

    def note_cached(self, *, token_count: int) -> None:
        """So many leading tokens of the prompt were reused."""
        self._cached_token_count = token_count

    def note_drafts(self, *, token_count: int, accepted_token_count: int) -> None:
        """So many tokens were guessed, and so many of them were right."""
        self._draft_token_count += token_count
        self._accepted_draft_token_count += accepted_token_count

    def draw(self, position: int) -> Draw:
        """How to choose the token at a position."""
        return Draw(self._sampling, position)

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
        self._put_text(scan.text, (token_id,))
        if scan.stop_string is not None:
            return self._put_finished(FinishReason.STOP_STRING, scan.stop_string)
        if self._generated_token_count >= self._limits.token_count_max:
            return self._finish(self._limits.reason_at_max)
        return None

    def _finish(self, reason: FinishReason) -> FinishReason:
        # What the detokenizer held back may yet complete a stop string.
        scan = self._scanner.add(self._detokenizer.finish())
        text = scan.text if scan.stop_string is not None else scan.text + self._scanner.finish()
        if text:
            self._put_text(text, ())
        if scan.stop_string is not None:
            return self._put_finished(FinishReason.STOP_STRING, scan.stop_string)
        return self._put_finished(reason, "")

    def _put_text(self, text: str, token_ids: tuple[int, ...]) -> None:
        self._stream.put(TextChunk(text, token_ids, self._sample_index))

    def _put_finished(self, reason: FinishReason, stop_string: str) -> FinishReason:
        later_token_count = max(0, self._generated_token_count - 1)
        decode_s = self._last_token_s - self._first_token_s
        self._stream.put(
            Finished(
                sample_index=self._sample_index,
                reason=reason,
                stop_string=stop_string,
                prompt_token_count=self.sequence.prompt_token_count,
                cached_token_count=self._cached_token_count,
                generated_token_count=self._generated_token_count,
                block_count=self.sequence.held_block_count,
                time_to_first_token_s=self._first_token_s - self._arrival_s,
                decode_tokens_per_second=later_token_count / decode_s if decode_s > 0 else 0.0,
                preemption_count=self.sequence.preemption_count,
                draft_token_count=self._draft_token_count,
                accepted_draft_token_count=self._accepted_draft_token_count,
            )
        )
        return reason
