"""What one request grows: its sequences, and what each pass means for them."""

from dataclasses import dataclass
from typing import Protocol

from prefixd.worker.answer import Answer, PartStream, Started
from prefixd.worker.prompt_logprobs import PromptLogprobsCollector
from prefixd.worker.reading import LogitRead, LogitReading
from prefixd.worker.sequence import Sequence
from prefixd.worker.step import PlannedChunk


@dataclass(frozen=True, slots=True)
class Branch:
    """A new sequence that shares another one's first ``token_count`` tokens.

    It has one token more, which is its own.
    """

    parent: Sequence
    child: Sequence
    token_count: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What a reading leads to: sequences that begin, and sequences that are over."""

    branches: tuple[Branch, ...] = ()
    ended: tuple[Sequence, ...] = ()


class Generation(Protocol):
    """All that runs for one request."""

    @property
    def stream(self) -> PartStream:
        """Where its parts go."""
        ...

    @property
    def sequence_count_max(self) -> int:
        """Most sequences that it runs at a time."""
        ...

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those that run or wait now; one at first."""
        ...

    def start(self, *, cached_token_count: int) -> None:
        """Its first sequence was opened for the first time."""
        ...

    def read(self, chunk: PlannedChunk) -> LogitRead:
        """What it wants of the logits of a chunk of one of its sequences."""
        ...

    def take(self, chunk: PlannedChunk, reading: LogitReading, *, now_s: float) -> Growth:
        """Takes what it wanted."""
        ...


class SampledGeneration:
    """One or several answers to one prompt, each drawn token by token.

    The prompt is computed once, in the first answer's sequence. From its last logits the first
    token of every answer is drawn; then the other sequences fork off.

    Invariants: an answer waits, or its sequence runs, or it is finished; all wait but the first
    until the prompt is computed.
    """

    def __init__(self, answers: tuple[Answer, ...], stream: PartStream) -> None:
        """Begins with the first answer's sequence; the others' hold the same prompt."""
        first, *others = answers
        self._stream = stream
        self._first = first
        self._waiting = tuple(others)
        self._answer_count = len(answers)
        self._running: dict[Sequence, Answer] = {first.sequence: first}
        self._logprobs = PromptLogprobsCollector(stream)

    @property
    def stream(self) -> PartStream:
        """Where its parts go."""
        return self._stream

    @property
    def sequence_count_max(self) -> int:
        """Most sequences that it runs at a time."""
        return self._answer_count

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those that run or wait now; one at first."""
        return tuple(self._running)

    def start(self, *, cached_token_count: int) -> None:
        """Its first sequence was opened for the first time."""
        for answer in (self._first, *self._waiting):
            answer.note_cached(token_count=cached_token_count)
        sequence = self._first.sequence
        prompt = sequence.token_ids[: sequence.prompt_token_count]
        self._stream.put(Started(sequence.sequence_id, tuple(prompt), cached_token_count))

    def read(self, chunk: PlannedChunk) -> LogitRead:
        """The prompt's log probabilities; the tokens behind the last position and the drafts."""
        sequence = chunk.sequence
        targets = self._logprobs.targets(chunk)
        if chunk.end_position < sequence.token_count:
            return LogitRead(targets)
        answer = self._running[sequence]
        position = sequence.token_count
        draws = [(answer.draw(position), *(other.draw(position) for other in self._waiting))]
        draws += [(answer.draw(position + 1 + index),) for index in range(chunk.draft_token_count)]
        return LogitRead(targets, tuple(draws))

    def take(self, chunk: PlannedChunk, reading: LogitReading, *, now_s: float) -> Growth:
        """Keeps log probabilities, and lets every answer go on that got a token."""
        self._logprobs.take(chunk, reading)
        if not reading.token_ids:
            return Growth()
        branches: list[Branch] = []
        ended: list[Sequence] = []
        (_, *first_token_ids), waiting = reading.token_ids[0], self._waiting
        self._waiting = ()
        for other, token_id in zip(waiting, first_token_ids, strict=True):
            if other.take(token_id, now_s=now_s) is None:
                self._running[other.sequence] = other
                prompt_token_count = other.sequence.prompt_token_count
                branches.append(Branch(chunk.sequence, other.sequence, prompt_token_count))
        if self._take_tokens(chunk, [row[0] for row in reading.token_ids], now_s=now_s):
            del self._running[chunk.sequence]
            ended.append(chunk.sequence)
        return Growth(tuple(branches), tuple(ended))

    def _take_tokens(self, chunk: PlannedChunk, token_ids: list[int], *, now_s: float) -> bool:
        """Takes tokens as long as the drafts before them are right; tells the answer's end."""
        answer = self._running[chunk.sequence]
        drafts = chunk.token_ids[len(chunk.token_ids) - chunk.draft_token_count :]
        right_count = 0
        while right_count < len(drafts) and drafts[right_count] == token_ids[right_count]:
            right_count += 1
        answer.note_drafts(token_count=len(drafts), accepted_token_count=right_count)
        return any(
            answer.take(token_id, now_s=now_s) is not None
            for token_id in token_ids[: right_count + 1]
        )
