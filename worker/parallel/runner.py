"""Rank 0's part of every pass, with the other ranks led through theirs."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from prefixd.worker.attention.batch import pack_tables
from prefixd.worker.model.forward import BlockCopy, ForwardPass
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.pass_check import check_copies, check_pass
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.parallel.frames import Work, encode_work
from prefixd.worker.parallel.ranks import Ranks
from prefixd.worker.sampling import Draw

T = TypeVar("T")


class ParallelRunner:
    """A model that is split over ranks by heads; this process is rank 0.

    Every rank is told the same tokens, slots, tables and copies, and stores and reads the KV of its
    own heads; the model's layers add their parts up. No KV leaves its rank.

    Invariants: all ranks run the same passes in the same order; a pass that one of them cannot run
    to its end is the last one.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        """Takes rank 0's own part, and the other ranks, which have theirs."""
        self._runner = runner
        self._ranks = ranks

    @property
    def model(self) -> LoadedModel:
        """Rank 0's part."""
        return self._runner.model

    @property
    def kv(self) -> PagedKv:
        """The pool of rank 0: its heads of every block."""
        return self._runner.kv

    @property
    def has_graphs(self) -> bool:
        """Whether passes of decode are recorded; so they are on all ranks, or on none."""
        return self._runner.has_graphs

    def run(self, forward: ForwardPass) -> Tensor:
        """Runs a pass on all ranks; see `ModelRunner.run`.

        Raises:
            AssertionError: the pass contradicts itself or the pool; no rank has heard of it.
            RankLost: a rank did not run it to its end.
        """
        self._check(forward)
        return self._together(forward, lambda: self._runner.run(forward))

    def draw(self, forward: ForwardPass, draws: Sequence[Draw]) -> Tensor:
        """Runs a pass on all ranks and chooses tokens on this one; see `ModelRunner.draw`.

        Raises:
            AssertionError: as `run`.
            RankLost: as `run`.
        """
        self._check(forward)
        return self._together(forward, lambda: self._runner.draw(forward, draws))

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Executes block copies alone on all ranks; see `ModelRunner.copy`.

        Raises:
            AssertionError: a copy contradicts the pool or another copy; no rank has heard of it.
            RankLost: a rank did not make them.
        """
        check_copies(copies, self.kv)
        self._together(copies, lambda: self._runner.copy(copies))

    def _check(self, forward: ForwardPass) -> None:
        tables = [pack_tables(group.sequences) for group in forward.groups]
        check_pass(forward, tables, self.model, self.kv)
        check_copies(forward.copies, self.kv)

    def _together(self, work: Work, own_part: Callable[[], T]) -> T:
        self._ranks.tell_all(encode_work(work))
        try:
            result = own_part()
        except Exception as error:
            self._ranks.give_up(error)
        self._ranks.answers()
        return result
