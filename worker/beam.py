"""Beam search: the likeliest hypotheses grow side by side, sharing blocks where they agree.

The rules are those of transformers' ``generate(num_beams=…, do_sample=False,
early_stopping=False)``, so that its results can be compared with ours: of all continuations of all
beams the best are ranked; one that ends counts if it ranks among the first ``beam_count``; the
search stops once no running beam scores better, at its present length, than the worst of
``beam_count`` finished hypotheses.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixd.worker.answer import (
    AnswerLimits,
    Finished,
    FinishReason,
    PartStream,
    Started,
    TextChunk,
)
from prefixd.worker.generation import Branch, Growth
from prefixd.worker.prompt_logprobs import PromptLogprobsCollector
from prefixd.worker.reading import Candidate, LogitRead, LogitReading
from prefixd.worker.sequence import Sequence as TokenSequence
from prefixd.worker.step import PlannedChunk


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search.

    Attributes:
        beam_count: hypotheses that grow side by side.
        length_penalty: a score is a log probability divided by the length to this power.
        sample_count: hypotheses that are wanted, at most ``beam_count``.
    """

    beam_count: int
    length_penalty: float
    sample_count: int


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam with one token more; ``logprob`` is that of all its generated tokens."""

    beam: TokenSequence
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """A finished one, without the token that ended it; the end's token counts in the score."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason
    block_count: int
    preemption_count: int


@dataclass(slots=True)
class _Times:
    """When the request came, and when its first and its last token."""

    arrival_s: float
    first_token_s: float = field(init=False)
    last_token_s: float = field(init=False)


class BeamGeneration:
    """One search.

    A beam whose logits are read waits for the others; then all go one token on together. A beam
    that goes on in several ways keeps its sequence for the best, and the others fork off.

    Invariants: all beams have the same number of tokens; each either is computed, or has its
    candidates and waits.
    """

    def __init__(
        self,
        first: TokenSequence,
        options: BeamOptions,
        limits: AnswerLimits,
        stream: PartStream,
        *,
        decode: Callable[[Sequence[int]], str],
        arrival_s: float,
    ) -> None:
        """Begins with the prompt's sequence as the only beam."""
        self._options = options
        self._limits = limits
        self._stream = stream
        self._decode = decode
        self._first = first
        self._beams: dict[TokenSequence, float] = {first: 0.0}
        self._candidates: dict[TokenSequence, tuple[Candidate, ...]] = {}
        self._finished: list[_Hypothesis] = []
        self._logprobs = PromptLogprobsCollector(stream)
        self._cached_token_count = 0
        self._child_count = 0
        self._times = _Times(arrival_s)

    @property
    def stream(self) -> PartStream:
        """Where its parts go."""
        return self._stream

    @property
    def sequence_count_max(self) -> int:
        """Most sequences that it runs at a time."""
        return self._options.beam_count

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The beams; one at first."""
        return tuple(self._beams)

    @property
    def _generated_token_count(self) -> int:
        beam = next(iter(self._beams))
        return beam.token_count - beam.prompt_token_count

    @property
    def _ranked_count(self) -> int:
        """Continuations to look at: so many may end that enough are left to go on."""
        return max(2, 1 + len(self._limits.end_token_ids)) * self._options.beam_count

    def start(self, *, cached_token_count: int) -> None:
        """The prompt's sequence was opened for the first time."""
        self._cached_token_count = cached_token_count
        prompt = self._first.token_ids[: self._first.prompt_token_count]
        self._stream.put(Started(self._first.sequence_id, tuple(prompt), cached_token_count))

    def read(self, chunk: PlannedChunk) -> LogitRead:
        """The prompt's log probabilities, and the likeliest tokens behind a beam's last."""
        is_last = chunk.end_position == chunk.sequence.token_count
        return LogitRead(
            target_token_ids=self._logprobs.targets(chunk),
            top_count=self._ranked_count if is_last else 0,
        )

    def take(self, chunk: PlannedChunk, reading: LogitReading, *, now_s: float) -> Growth:
        """Keeps candidates; once all beams have theirs, all go one token on."""
        self._logprobs.take(chunk, reading)
        # A beam that was computed again may have gone on meanwhile.
        if not reading.top or chunk.end_position != chunk.sequence.token_count:
            return Growth()
        self._candidates[chunk.sequence] = reading.top
        if len(self._candidates) < len(self._beams):
            return Growth()
        if self._generated_token_count == 0:
            self._times.first_token_s = now_s
        self._times.last_token_s = now_s
        return self._go_on()

    def _go_on(self) -> Growth:
        length = self._generated_token_count + 1
        running: list[_Continuation] = []
        for rank, continuation in enumerate(self._ranked()):
            reason = self._end(continuation.token_id, length=length)
            if reason is None:
                running.append(continuation)
            elif rank < self._options.beam_count:
                self._finish(continuation, reason, length=length)
        running = running[: self._options.beam_count]
        self._candidates = {}
        if not running or not self._can_improve(running[0], length=length):
            return self._stop()
        return self._extend(running)

    def _ranked(self) -> list[_Continuation]:
        continuations = (
            _Continuation(beam, candidate.token_id, logprob + candidate.logprob)
            for beam, logprob in self._beams.items()
            for candidate in self._candidates[beam]
        )
        return heapq.nlargest(self._ranked_count, continuations, key=lambda c: c.logprob)

    def _end(self, token_id: int, *, length: int) -> FinishReason | None:
        if token_id in self._limits.end_token_ids:
            return FinishReason.END_OF_SEQUENCE
        return self._limits.reason_at_max if length >= self._limits.token_count_max else None

    def _finish(self, last: _Continuation, reason: FinishReason, *, length: int) -> None:
        beam = last.beam
        token_ids = tuple(beam.token_ids[beam.prompt_token_count :])
        if reason is not FinishReason.END_OF_SEQUENCE:
            token_ids += (last.token_id,)
        self._finished.append(
            _Hypothesis(
                token_ids,
                self._score(last, length=length),
                reason,
                beam.held_block_count,
                beam.preemption_count,
            )
        )
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._options.beam_count :]

    def _score(self, continuation: _Continuation, *, length: int) -> float:
        score: float = continuation.logprob / length**self._options.length_penalty
        return score

    def _can_improve(self, best: _Continuation, *, length: int) -> bool:
        if len(self._finished) < self._options.beam_count:
            return True
        return self._score(best, length=length) > self._finished[-1].score

    def _extend(self, running: list[_Continuation]) -> Growth:
        """Every beam of the next round, in order of rank; those that have no part in it end."""
        beams: dict[TokenSequence, float] = {}
        branches: list[Branch] = []
        own: list[_Continuation] = []
        for continuation in running:
            beam = continuation.beam
            if beam in beams:
                child = self._child(continuation)
                beams[child] = continuation.logprob
                branches.append(Branch(beam, child, beam.token_count))
            else:
                beams[beam] = continuation.logprob
                own.append(continuation)
        for continuation in own:
            continuation.beam.token_ids.append(continuation.token_id)
        ended = tuple(beam for beam in self._beams if beam not in beams)
        self._beams = beams
        return Growth(tuple(branches), ended)

    def _child(self, continuation: _Continuation) -> TokenSequence:
        parent = continuation.beam
        self._child_count += 1
        return TokenSequence(
            sequence_id=f"{self._first.sequence_id}/{self._child_count}",
            token_ids=[*parent.token_ids, continuation.token_id],
            prompt_token_count=parent.prompt_token_count,
            arrival=parent.arrival,
            cache_salt=parent.cache_salt,
            lora=parent.lora,
            was_opened=True,
        )

    def _stop(self) -> Growth:
        wanted = self._finished[: self._options.sample_count]
        assert len(wanted) == self._options.sample_count, "every beam has come to an end"
        for index, hypothesis in enumerate(wanted):
            text = self._decode(hypothesis.token_ids)
            self._stream.put(TextChunk(text, hypothesis.token_ids, index))
        for index, hypothesis in enumerate(wanted):
            self._stream.put(self._finished_part(index, hypothesis))
        ended = tuple(self._beams)
        self._beams = {}
        return Growth(ended=ended)

    def _finished_part(self, index: int, hypothesis: _Hypothesis) -> Finished:
        times = self._times
        token_count = len(hypothesis.token_ids)
        decode_s = times.last_token_s - times.first_token_s
        return Finished(
            sample_index=index,
            reason=hypothesis.reason,
            stop_string="",
            prompt_token_count=self._first.prompt_token_count,
            cached_token_count=self._cached_token_count,
            generated_token_count=token_count,
            block_count=hypothesis.block_count,
            time_to_first_token_s=times.first_token_s - times.arrival_s,
            decode_tokens_per_second=max(0, token_count - 1) / decode_s if decode_s > 0 else 0.0,
            preemption_count=hypothesis.preemption_count,
            score=hypothesis.score,
        )
