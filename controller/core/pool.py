"""One pool: its block index, free order, sequences and step log."""

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import (
    Identity,
    PoolSpec,
    PrefixMatch,
    Step,
    StepId,
    StepReply,
    TokenArray,
)


class Pool:
    """The paged KV memory of one worker, planned step by step.

    Every method is atomic: it raises a CacheError and has changed nothing, or it is done.
    """

    def __init__(self, spec: PoolSpec, *, epoch: int, hasher: Hasher) -> None:
        self.spec = spec
        self.epoch = epoch
        self.hasher = hasher
        self.model_version = spec.model_version
        self.draining = False

    @property
    def sequence_count(self) -> int:
        """Open sequences."""
        raise NotImplementedError

    @property
    def revision(self) -> int:
        """Position in the event log: it grows with every change of the published set."""
        raise NotImplementedError

    @property
    def applied_step_id(self) -> StepId:
        """Last step applied; 0 before the first one."""
        raise NotImplementedError

    @property
    def executed_step_id(self) -> StepId:
        """Last step confirmed as executed."""
        raise NotImplementedError

    def apply_step(self, step: Step, *, now_ms: int) -> StepReply:
        """Apply the next step, or return the kept reply of a known one (the same object).

        Raises StepOutOfOrder (expected_step_id), StepsInFlight, FieldInvalid, TokenIdInvalid,
        PromptEmpty or Unsupported; `field` names the place from the step on, for instance
        `entries[2].open.token_ids[17]`. A refused step changes nothing, not even the executed id.
        What depends on state is a Refusal or a DeferredRow in the reply.
        """
        raise NotImplementedError

    def match_prefix(self, token_ids: TokenArray, identity: Identity) -> PrefixMatch:
        """Tell how many leading tokens of a prompt are cached; changes nothing (S8).

        Raises PromptEmpty, TokenIdInvalid or FieldInvalid, with fields `token_ids[i]` and
        `identity...`.
        """
        raise NotImplementedError

    def flush(self) -> int:
        """Empty the index (S21) and return the number of dropped blocks.

        Raises BlocksInUse (held_block_count, unconfirmed_step_count).
        """
        raise NotImplementedError

    def set_model_version(self, model_version: str) -> int:
        """Drop everything computed under another version (S4); return the dropped idle blocks."""
        raise NotImplementedError

    def drain(self) -> None:
        """Refuse new sequences from now on."""
        self.draining = True

    def hash_slice(self, block_count_max: int) -> bool:
        """Compute up to that many missing digests; True while some are left."""
        raise NotImplementedError
