"""The free order as a list of runs, against a plain list."""

import random
from array import array

from prefixd.controller.core.free_order import CachedRun, FreeOrder, PlainRun


def test_a_fresh_order_is_one_range() -> None:
    """A pool of a million blocks costs one segment."""
    order = FreeOrder(1_000_001)
    assert order.plain_count == order.available_count == 1_000_000
    assert len(list(order)) == 1
    assert order.pop_plain() == 1


def test_runs_equal_a_plain_list() -> None:
    """Pushing, appending, removing, taking and forgetting, at random, against a list of blocks."""
    chance = random.Random(7)
    for _ in range(30):
        order = FreeOrder(40)
        model = list(range(1, 40))
        held: list[list[int]] = []
        idle: list[CachedRun] = []
        for _ in range(200):
            action = chance.randrange(5)
            if action == 0 and order.available_count:
                count = chance.randint(1, min(5, len(model)))
                taken: list[int] = []
                while len(taken) < count:
                    segment = order.first()
                    if isinstance(segment, PlainRun):
                        taken += order.take_plain(segment, count - len(taken))
                    else:
                        part = min(count - len(taken), len(segment.block_ids))
                        order.shrink(segment, part)
                        taken += reversed(segment.block_ids[-part:])
                        del segment.block_ids[-part:]
                        idle = [run for run in idle if len(run.block_ids)]
                assert taken == model[:count]
                del model[:count]
                held.append(taken)
            elif action == 1 and held:
                block_ids = held.pop(chance.randrange(len(held)))
                order.push_front(block_ids)
                model[:0] = block_ids
            elif action == 2 and held:
                block_ids = held.pop(chance.randrange(len(held)))
                run = CachedRun(array("q", block_ids))
                order.append(run)
                idle.append(run)
                model += reversed(block_ids)
            elif action == 3 and idle:
                run = idle.pop(chance.randrange(len(idle)))
                order.remove(run)
                model = [block for block in model if block not in set(run.block_ids)]
                held.append(list(run.block_ids))
            elif action == 4 and idle:
                order.become_plain(idle.pop(chance.randrange(len(idle))))
            assert order.block_ids() == model
            assert order.available_count == len(model)


def test_withheld_runs_are_passed_over_until_the_step_ends() -> None:
    """They keep their place in the order (S22)."""
    order = FreeOrder(6)
    taken = [order.pop_plain() or 0, order.pop_plain() or 0]
    order.push_front_withheld(taken[:1])
    run = CachedRun(array("q", taken[1:]))
    order.append(run)
    order.withhold(run)
    assert order.block_ids() == [1, 3, 4, 5, 2]
    assert order.available_count == 3
    assert order.pop_plain() is None
    first = order.first()
    assert isinstance(first, PlainRun)
    assert order.take_plain(first, 3) == [3, 4, 5]
    order.end_step()
    assert order.available_count == 2
    assert order.pop_plain() == 1
