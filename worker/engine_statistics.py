"""What an engine tells of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What the engine has done since its start, and what it is doing."""

    running_sequence_count: int
    waiting_sequence_count: int
    prefill_token_count: int
    decode_token_count: int
    preemption_count: int
