"""Step ids, kept replies, steps in flight, and malformed steps (section 4.1 of the design)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixd.controller.core.errors import (
    CacheError,
    FieldInvalid,
    PromptEmpty,
    StepOutOfOrder,
    StepsInFlight,
    TokenIdInvalid,
)
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX, TOKENS_PER_SEQUENCE_MAX
from prefixd.controller.core.messages import (
    Entry,
    FailedSteps,
    Identity,
    LoraAdapter,
    MultimodalItem,
    Step,
    StepId,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    fork_entry,
    open_entry,
)


def step(step_id: int, executed: int, *entries: Entry) -> Step:
    """Returns a step."""
    return Step(StepId(step_id), StepId(executed), entries)


def test_a_step_sent_twice_is_applied_once() -> None:
    """The second answer is the kept reply itself."""
    driver = Driver()
    sent = step(1, 0, open_entry(1, [1, 2, 3, 4, 5]))
    reply = driver.send(sent)
    before = driver.seen()
    assert driver.send(sent) is reply
    assert driver.seen() == before


def test_replies_are_kept_until_their_step_is_confirmed() -> None:
    """An older id is out of order then, and the error says which id is expected."""
    driver = Driver()
    driver.send(step(1, 0))
    driver.send(step(2, 0))
    driver.send(step(3, 1))
    assert driver.send(step(2, 0)).step_id == 2
    with pytest.raises(StepOutOfOrder) as caught:
        driver.send(step(1, 0))
    assert caught.value.numbers["expected_step_id"] == 4


@pytest.mark.parametrize("step_id", [0, 2, 7])
def test_any_other_id_is_out_of_order(step_id: int) -> None:
    """The first id of an epoch is 1; ids leave no gap."""
    driver = Driver()
    with pytest.raises(StepOutOfOrder) as caught:
        driver.send(step(step_id, 0))
    assert caught.value.numbers["expected_step_id"] == 1
    assert driver.pool.applied_step_id == 0


def test_steps_in_flight_are_bounded() -> None:
    """The next step is refused until one of the unconfirmed ones is confirmed."""
    driver = Driver()
    for step_id in range(1, STEPS_IN_FLIGHT_MAX + 1):
        driver.send(step(step_id, 0))
    with pytest.raises(StepsInFlight):
        driver.send(step(STEPS_IN_FLIGHT_MAX + 1, 0))
    driver.send(step(STEPS_IN_FLIGHT_MAX + 1, 1))


def test_a_step_that_reports_a_failure_frees_all_places_in_flight() -> None:
    """Failed steps are settled as executed ones are."""
    driver = Driver()
    for step_id in range(1, STEPS_IN_FLIGHT_MAX + 1):
        driver.send(step(step_id, 0))
    failed = FailedSteps(StepId(1), StepId(STEPS_IN_FLIGHT_MAX))
    driver.send(replace(step(STEPS_IN_FLIGHT_MAX + 1, 0), failed=failed))


@pytest.mark.parametrize("executed", [-1, 1, 4])
def test_the_executed_id_neither_falls_nor_runs_ahead(executed: int) -> None:
    """It stays between its last value and the last applied id."""
    driver = Driver()
    driver.send(step(1, 0))
    driver.send(step(2, 0))
    driver.send(step(3, 2))
    with pytest.raises(FieldInvalid) as caught:
        driver.send(step(4, executed))
    assert caught.value.field == "executed_step_id"


def test_an_executed_id_that_is_sent_again_changes_nothing() -> None:
    """Also after steps behind it have failed."""
    driver = Driver()
    driver.send(step(1, 0, open_entry(1, [1, 2])))
    driver.send(step(2, 1))
    driver.send(replace(step(3, 1), failed=FailedSteps(StepId(2), StepId(2))))
    driver.send(step(4, 1))
    assert driver.pool.executed_step_id == 1
    driver.send(step(5, 4))
    assert driver.pool.executed_step_id == 4


def test_an_empty_step_only_confirms() -> None:
    """It publishes what was written."""
    driver = Driver()
    driver.send(step(1, 0, open_entry(1, [1, 2, 3, 4, 5])))
    reply = driver.send(step(2, 1))
    assert reply.outcomes == ()
    assert reply.available_block_count == 8
    assert sorted(driver.published()) == [1]


DIGEST = b"\x01" * 32
MALFORMED: list[tuple[Entry, type[CacheError], str]] = [
    (open_entry(1, []), PromptEmpty, "open.token_ids"),
    (open_entry(1, [1, 2, 50, 51]), TokenIdInvalid, "open.token_ids[2]"),
    (open_entry(-1, [1]), FieldInvalid, "open.handle"),
    (open_entry(2**32, [1]), FieldInvalid, "open.handle"),
    (open_entry(1, [1], sequence_id=""), FieldInvalid, "open.sequence_id"),
    (open_entry(1, [1], sequence_id="ü" * 129), FieldInvalid, "open.sequence_id"),
    (open_entry(1, [1], lookahead_slot_count=-1), FieldInvalid, "open.lookahead_slot_count"),
    (open_entry(1, [1], must_fit_token_count=-1), FieldInvalid, "open.must_fit_token_count"),
    (
        open_entry(1, [1], schedule_token_count_max=-1),
        FieldInvalid,
        "open.schedule_token_count_max",
    ),
    (open_entry(1, [1], preemption_count=-1), FieldInvalid, "open.preemption_count"),
    (open_entry(1, [1], await_token_count_min=-1), FieldInvalid, "open.await_token_count_min"),
    (
        open_entry(1, [1], identity=Identity(cache_salt="s" * 129)),
        FieldInvalid,
        "open.identity.cache_salt",
    ),
    (
        open_entry(1, [1], identity=Identity(lora=LoraAdapter(""))),
        FieldInvalid,
        "open.identity.lora.name",
    ),
    (
        open_entry(1, [1], identity=Identity(prompt_embeds_digests=(DIGEST, b"short"))),
        FieldInvalid,
        "open.identity.prompt_embeds_digests[1]",
    ),
    (
        open_entry(1, [1], identity=Identity(multimodal_items=(MultimodalItem("", 0, 1),))),
        FieldInvalid,
        "open.identity.multimodal_items[0].identifier",
    ),
    (
        open_entry(1, [1], identity=Identity(multimodal_items=(MultimodalItem("a", -1, 1),))),
        FieldInvalid,
        "open.identity.multimodal_items[0].offset",
    ),
    (
        open_entry(1, [1], identity=Identity(multimodal_items=(MultimodalItem("a", 0, 0),))),
        FieldInvalid,
        "open.identity.multimodal_items[0].token_count",
    ),
    (
        open_entry(
            1,
            [1],
            identity=Identity(
                multimodal_items=(MultimodalItem("a", 5, 1), MultimodalItem("b", 4, 1))
            ),
        ),
        FieldInvalid,
        "open.identity.multimodal_items[1].offset",
    ),
    (extend_entry(1, [77], known=1, scheduled=1), TokenIdInvalid, "extend.token_ids[0]"),
    (extend_entry(1, [], known=-1, scheduled=1), FieldInvalid, "extend.known_count_before"),
    (
        extend_entry(1, [], known=1, scheduled=TOKENS_PER_SEQUENCE_MAX + 1),
        FieldInvalid,
        "extend.scheduled_count_before",
    ),
    (
        extend_entry(1, [], known=4, scheduled=6, rollback_to_token_count=3),
        FieldInvalid,
        "extend.rollback_to_token_count",
    ),
    (
        extend_entry(1, [], known=4, scheduled=6, rollback_to_token_count=7),
        FieldInvalid,
        "extend.rollback_to_token_count",
    ),
    (
        extend_entry(1, [], known=4, scheduled=6, draft_token_count=-1),
        FieldInvalid,
        "extend.draft_token_count",
    ),
    (decode_entry((1, 1, 1, [2]), (1, 2, 2, [3])), FieldInvalid, "decode.handles[1]"),
    (decode_entry((1, -1, 1, [2])), FieldInvalid, "decode.scheduled_count_before[0]"),
    (decode_entry((2, 1, 1, [2]), (1, 1, -5, [2])), FieldInvalid, "decode.known_count_before[1]"),
    (decode_entry((2, 1, 1, [2]), (1, 1, 1, [2, 99])), TokenIdInvalid, "decode.token_ids[2]"),
    (
        replace(decode_entry((1, 1, 1, [2])), known_count_before=np.zeros(2, np.int64)),
        FieldInvalid,
        "decode.known_count_before",
    ),
    (
        replace(decode_entry((1, 1, 1, [2])), token_counts=np.array([2])),
        FieldInvalid,
        "decode.token_ids",
    ),
    (close_entry(-1), FieldInvalid, "close.handle"),
    (fork_entry(1, 2, 0), FieldInvalid, "fork.token_count"),
    (fork_entry(-1, 2, 1), FieldInvalid, "fork.parent_handle"),
    (fork_entry(1, -1, 1), FieldInvalid, "fork.child_handle"),
    (fork_entry(1, 2, 1, sequence_id=""), FieldInvalid, "fork.child_sequence_id"),
]


@pytest.mark.parametrize(
    ("entry", "error", "field"), MALFORMED, ids=[field for _, _, field in MALFORMED]
)
def test_a_malformed_entry_refuses_the_whole_step(
    entry: Entry, error: type[CacheError], field: str
) -> None:
    """The error names the field; nothing of the step is applied, not even its executed id."""
    driver = Driver(vocabulary_size=50)
    driver.open(8, [1, 2, 3, 4, 5])
    before = driver.seen()
    with pytest.raises(error) as caught:
        driver.step(close_entry(8), entry)
    assert caught.value.field == f"entries[1].{field}"
    assert driver.seen() == before
    assert (driver.pool.applied_step_id, driver.pool.executed_step_id) == (1, 0)


def test_a_negative_token_budget_is_refused() -> None:
    """Absent means none; negative means nothing."""
    with pytest.raises(FieldInvalid, match="token_budget"):
        Driver().step(budget=-1)


@pytest.mark.parametrize(
    ("identity", "tokens", "error", "field"),
    [
        (Identity(), [], PromptEmpty, "token_ids"),
        (Identity(), [1, 60], TokenIdInvalid, "token_ids[1]"),
        (Identity(cache_salt="s" * 129), [1], FieldInvalid, "identity.cache_salt"),
    ],
)
def test_match_prefix_checks_its_input(
    identity: Identity, tokens: list[int], error: type[CacheError], field: str
) -> None:
    """As an open does."""
    with pytest.raises(error) as caught:
        Driver(vocabulary_size=50).match(tokens, identity)
    assert caught.value.field == field


def test_numbers_of_an_error_stand_apart_from_its_text() -> None:
    """A client tests numbers, never the text."""
    driver = Driver(vocabulary_size=50)
    with pytest.raises(TokenIdInvalid) as caught:
        driver.step(open_entry(1, [1, 2, 50]))
    expected: dict[str, Any] = {"index": 2, "token_id": 50, "vocabulary_size": 50}
    assert caught.value.numbers == expected
