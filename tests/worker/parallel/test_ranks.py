"""The processes of the other ranks: how their ends are noticed, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from prefixd.worker.parallel.ranks import RankEnded, RankLost, Ranks

TIMEOUT_S = 30.0


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two processes that wait for what they are told first."""
    with Ranks(3) as started:
        yield started


def is_alive(process_id: int) -> bool:
    """Whether a process of that id exists."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_rank_is_noticed_by_whoever_watches(ranks: Ranks) -> None:
    """Nothing was asked of it."""
    os.kill(ranks.process_ids[1], signal.SIGKILL)

    with pytest.raises(RankLost, match="rank 2 ended with status -9; the model needs all 3 ranks"):
        asyncio.run(asyncio.wait_for(ranks.watch(), TIMEOUT_S))


def test_a_killed_rank_is_noticed_by_whoever_waits_for_answers(ranks: Ranks) -> None:
    """Though the other one lives, and answers nothing either."""
    os.kill(ranks.process_ids[0], signal.SIGKILL)

    with pytest.raises(RankLost, match="rank 1 ended"):
        ranks.answers()
    with pytest.raises(RankLost, match="rank 1 ended"):
        ranks.tell_all(b"more")


def test_what_rank_0_cannot_do_is_told_as_its_own_failure(ranks: Ranks) -> None:
    """No other rank is to blame."""
    with pytest.raises(RankLost, match="rank 0 failed: no room") as caught:
        ranks.give_up(MemoryError("no room"))

    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(RankLost, match="rank 0 failed"):
        ranks.check()


def test_an_error_that_comes_of_a_rank_s_end_is_told_as_such(ranks: Ranks) -> None:
    """Not as what it looked like."""
    os.kill(ranks.process_ids[0], signal.SIGKILL)

    with pytest.raises(RankEnded, match="rank 1 ended with status -9"):
        ranks.check_ends(RuntimeError("connection closed by peer"))


def test_what_interrupts_a_terminal_s_processes_does_not_reach_them(ranks: Ranks) -> None:
    """Rank 0 ends them; not even one that is still starting tells of an interrupt of its own."""
    groups = {os.getpgid(process_id) for process_id in ranks.process_ids}

    assert os.getpgrp() not in groups


def test_they_go_by_themselves_once_they_are_let_go(ranks: Ranks) -> None:
    """Long before they would be killed."""
    began = time.monotonic()
    ranks.close(timeout_s=TIMEOUT_S)

    assert time.monotonic() - began < TIMEOUT_S
    assert not any(map(is_alive, ranks.process_ids))


def test_a_rank_that_is_stuck_is_killed_at_the_end(ranks: Ranks) -> None:
    """None lives once they are closed."""
    os.kill(ranks.process_ids[0], signal.SIGSTOP)
    ranks.close(timeout_s=0.1)

    assert not any(map(is_alive, ranks.process_ids))
