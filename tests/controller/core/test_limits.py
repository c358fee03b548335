"""Documented limits: each refuses with its numbers and changes nothing."""

import pytest

from prefixd.controller.core import limits
from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.messages import DecodeOutcome
from tests.controller.core.driver import Driver, decode_entry, extend_entry, open_entry


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A pool whose sequences may have ten tokens, with one of nine."""
    monkeypatch.setattr(limits, "TOKENS_PER_SEQUENCE_MAX", 10)
    driver = Driver(block_count=40)
    driver.open(1, list(range(9)))
    return driver


def test_an_extend_beyond_the_limit_is_refused(driver: Driver) -> None:
    """Its known tokens would be too many."""
    refusal = driver.refused(extend_entry(1, [1, 2], known=9, scheduled=9))
    assert refusal.reason == "LIMIT_EXCEEDED"
    assert dict(refusal.numbers) == {"token_count": 11, "tokens_per_sequence_max": 10}


def test_slots_beyond_the_limit_are_refused(driver: Driver) -> None:
    """Lookahead slots count too."""
    entry = extend_entry(1, [1], known=9, scheduled=9, lookahead_slot_count=1)
    assert driver.refused(entry).reason == "LIMIT_EXCEEDED"


def test_a_decode_row_beyond_the_limit_is_deferred(driver: Driver) -> None:
    """The last token fits, the next one does not, though the block has room for it."""
    driver.decode(1, 5)
    before = driver.sequence(1)
    outcome = driver.outcome(decode_entry((1, 10, 10, [6])))
    assert isinstance(outcome, DecodeOutcome)
    assert [row.reason for row in outcome.deferred_rows] == ["LIMIT_EXCEEDED"]
    assert driver.sequence(1).known_count == before.known_count


def test_sequences_of_a_pool_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused until one is closed."""
    monkeypatch.setattr(limits, "SEQUENCES_PER_POOL_MAX", 2)
    driver = Driver()
    driver.open(1, [1])
    driver.open(2, [2])
    assert driver.refused(open_entry(3, [3])).reason == "LIMIT_EXCEEDED"
    driver.close(1)
    driver.open(3, [3])


def test_a_prompt_beyond_the_limit_is_malformed() -> None:
    """The message alone shows it."""
    driver = Driver()
    prompt = [0] * (limits.TOKENS_PER_SEQUENCE_MAX + 1)
    with pytest.raises(FieldInvalid) as caught:
        driver.step(open_entry(1, prompt))
    assert caught.value.field == "entries[0].open.token_ids"
