"""Named limits of the worker."""

from dataclasses import dataclass

SAMPLES_MAX = 32
"""Answers to one prompt, and beams of one search."""
LENGTH_PENALTY_MAX = 10.0
"""Largest length penalty of a beam search, and its negative the smallest."""
DRAFT_TOKENS_MAX = 16
"""Tokens that prompt lookup guesses ahead of one step."""
RETENTION_PRIORITY_MAX = 7
"""Priority of a retention hint."""
RETENTION_MS_MAX = 7 * 24 * 3_600_000
"""How long a retention hint may hold."""
STOP_STRINGS_MAX = 16
"""Stop strings of one request."""
STOP_STRING_LENGTH_MAX = 256
"""Length of a stop string in characters."""
CACHE_SALT_LENGTH_MAX = 128
"""Length of a cache salt in characters."""
MODEL_VERSION_LENGTH_MAX = 256
"""Length of a version of the model's weights in characters."""
LORA_NAME_LENGTH_MAX = 256
"""Length of a LoRA adapter's name or version in characters."""
LORA_PATH_LENGTH_MAX = 4_096
"""Length of a LoRA adapter's path in characters."""
SEQUENCE_ID_BYTES_MAX = 256
"""Length of a sequence id in UTF-8."""
FORK_NAME_BYTES_MAX = 16
"""What the names of sequences that fork off add to it."""
TOKEN_COUNT_DEFAULT = 256
"""Most tokens of an answer whose request names no number."""
LIVE_SEQUENCES_MAX = 1_024
"""Answers that run or wait at a time."""
TOKEN_BUDGET_MAX = 1_048_576
"""Most tokens of one step: a GPU's worker computes such a step before it serves."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Size of one gRPC message."""
OPENS_PER_STEP_MAX = 16
"""Sequences that one step tries to admit: refused prompts travel again."""
AWAIT_COUNT_MAX = 64
"""Opens that may be told to await a prefix before the sequence computes it itself."""
PARTIAL_AWAIT_TOKEN_COUNT = 2
"""Tokens for which an open awaits a prefix where matches may end inside a block."""
SHORTAGE_COUNT_MAX = 8
"""Times that a sequence which runs alone may find no block before it is given up."""
FORWARD_FAILURES_MAX = 3
"""Failed forward passes in a row before the answers that they computed are given up."""


class LimitInvalid(ValueError):
    """A bound is out of its range or contradicts another."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step and of the batch.

    Raises:
        LimitInvalid: a bound is out of range, or the budget leaves nothing for prefill beside a
            full batch of decode rows.
    """

    chunk_token_count_max: int = 512
    running_sequence_count_max: int = 64
    token_budget: int = 1_024

    def __post_init__(self) -> None:
        """Checks the bounds."""
        maxima = {
            "chunk_token_count_max": TOKEN_BUDGET_MAX,
            "running_sequence_count_max": LIVE_SEQUENCES_MAX,
            "token_budget": TOKEN_BUDGET_MAX,
        }
        for name, maximum in maxima.items():
            bound = getattr(self, name)
            if not 1 <= bound <= maximum:
                option = f"--{name.replace('_', '-')}"
                raise LimitInvalid(f"{option} is {bound}, but must be 1 to {maximum}")
        if self.token_budget <= self.running_sequence_count_max:
            raise LimitInvalid(
                f"--token-budget is {self.token_budget}, but must be above"
                f" --running-sequence-count-max ({self.running_sequence_count_max})"
            )
