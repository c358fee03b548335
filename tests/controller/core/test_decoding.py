"""A decode entry does what its rows would do one after the other, however many of them are odd."""

import random

import pytest

from prefixd.controller.core.messages import DecodeOutcome, DeferredRow
from tests.controller.core.driver import Driver, Row, close_entry, decode_entry, open_entry

BLOCK_SIZE = 4
SEQUENCE_COUNT = 12


def opened(generator: random.Random) -> Driver:
    """Returns a pool that can become too small, with sequences of many lengths and twins."""
    driver = Driver(block_count=52, block_size=BLOCK_SIZE)
    driver.step(
        *(
            open_entry(handle, [handle % 3] * generator.randint(1, 9))
            for handle in range(SEQUENCE_COUNT)
        )
    )
    return driver


def rows_of(driver: Driver, generator: random.Random) -> list[Row]:
    """Draws a row for most sequences; some are wrong, some supply no token or several."""
    rows: list[Row] = []
    for handle in generator.sample(range(SEQUENCE_COUNT + 2), k=SEQUENCE_COUNT):
        if handle not in driver.pool.state.sequences:
            rows.append((handle, 1, 1, [7]))
            continue
        view = driver.sequence(handle)
        oddity = generator.random()
        known, scheduled, token_count = view.known_count, view.scheduled_count, 1
        if oddity < 0.08:
            scheduled += 1
        elif oddity < 0.16:
            token_count = 3
        elif oddity < 0.24:
            token_count = 0
        rows.append((handle, scheduled, known, [handle % 2] * token_count))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_a_decode_entry_equals_its_rows_one_by_one(seed: int) -> None:
    """Blocks, tables, refusals and everything an operator sees, with odd rows among the others."""
    whole, split = (opened(random.Random(seed)) for _ in range(2))
    generator = random.Random(1_000 + seed)
    for _ in range(25):
        rows = rows_of(whole, generator)
        budget = generator.choice([None, None, None, SEQUENCE_COUNT // 2])
        (outcome,) = whole.step(decode_entry(*rows), budget=budget).outcomes
        assert isinstance(outcome, DecodeOutcome)
        block_ids: list[int] = []
        deferred: list[DeferredRow] = []
        outcomes = split.step(*(decode_entry(row) for row in rows), budget=budget).outcomes
        for index, alone in enumerate(outcomes):
            assert isinstance(alone, DecodeOutcome)
            block_ids += alone.new_block_ids[0].tolist()
            deferred += [
                DeferredRow(index, row.reason, row.needed_count, row.available_count)
                for row in alone.deferred_rows
            ]
        assert outcome.new_block_ids[0].tolist() == block_ids
        assert list(outcome.deferred_rows) == deferred
        assert whole.seen() == split.seen()
        if generator.random() < 0.2:
            handle = generator.randrange(SEQUENCE_COUNT)
            if handle in whole.pool.state.sequences:
                for driver in (whole, split):
                    driver.step(close_entry(handle))
