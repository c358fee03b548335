"""Collects the log probabilities of a prompt's tokens, chunk by chunk."""

from prefixd.worker.answer import PartStream, PromptLogprobs
from prefixd.worker.reading import LogitReading
from prefixd.worker.step import PlannedChunk


class PromptLogprobsCollector:
    """For one sequence that may want them.

    Invariant: they are sent once, when the prompt's last token is computed.
    """

    def __init__(self, stream: PartStream) -> None:
        self._stream = stream
        self._logprobs: list[float] = []

    @staticmethod
    def targets(chunk: PlannedChunk) -> tuple[int, ...]:
        """The tokens whose log probabilities the logits of a chunk tell; none if not wanted."""
        sequence = chunk.sequence
        if not sequence.wants_prompt_logits:
            return ()
        end = min(chunk.end_position + 1, sequence.prompt_token_count)
        return tuple(sequence.token_ids[chunk.start_position + 1 : end])

    def take(self, chunk: PlannedChunk, reading: LogitReading) -> None:
        """Keeps what a chunk told, and sends all of it where that was the prompt's end."""
        sequence = chunk.sequence
        if not sequence.wants_prompt_logits:
            return
        # Positions that a failed pass or a preemption makes the worker compute again are replaced.
        del self._logprobs[chunk.start_position :]
        assert len(self._logprobs) == chunk.start_position, "chunks follow one another"
        self._logprobs += reading.target_logprobs
        if chunk.end_position >= sequence.prompt_token_count:
            sequence.wants_prompt_logits = False
            self._stream.put(PromptLogprobs(tuple(self._logprobs)))
