"""Versions of the weights belong to the identity (S4)."""

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import Identity, LoraAdapter, Refusal
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    new_block_ids,
    open_entry,
)

PROMPT = list(range(100, 113))


def test_s4_a_bump_drops_idle_blocks_and_keeps_the_order() -> None:
    """What an older version computed is unreachable at once."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.step()
    order = driver.free_order()
    revision = driver.pool.revision
    assert driver.pool.set_model_version("2") == 3
    assert driver.free_order() == order
    assert driver.pool.revision == revision + 1
    assert driver.match(PROMPT).published_token_count == 0
    assert driver.blocks()[0].block_hash is None


def test_s4_stating_the_current_version_changes_nothing() -> None:
    """It is idempotent."""
    driver = Driver(model_version="7")
    driver.open(1, PROMPT)
    driver.step()
    before = driver.seen()
    assert driver.pool.set_model_version("7") == 0
    assert driver.seen() == before


def test_s4_running_sequences_go_on_and_publish_nothing_more() -> None:
    """Their blocks are uncached when they are closed, shared or not."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.pool.set_model_version("2")
    for token_id in range(8):
        driver.decode(1, token_id)
    assert driver.sequence(1).uncacheable
    assert driver.sequence(1).model_version == ""
    assert driver.published() == {}
    assert driver.open(3, PROMPT).plan.cached.end_token == 0
    driver.close(1)
    assert set(driver.table(2)).isdisjoint(driver.free_order())
    driver.close(2)
    driver.close(3)
    driver.step()
    assert len(driver.published()) == 3


def test_s4_a_cut_sequence_of_an_older_version_recomputes_privately() -> None:
    """It must not match what the new version computed."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.pool.set_model_version("2")
    driver.open(2, PROMPT)
    driver.step(open_entry(3, [1]), executed=2)
    driver.step(executed=2, failed=(3, 3))
    extended = driver.extend(1, [])
    assert extended.plan.cached.end_token == 0
    assert set(new_block_ids(extended)).isdisjoint(driver.table(2))


def test_s4_a_version_is_the_last_extra_key_of_every_block() -> None:
    """No digest names two contents; the default version leaves digests as vLLM's."""
    hasher = Hasher("sha256_cbor", seed="0")
    driver = Driver(model_version="2")
    lora = LoraAdapter("sql", path="/sql", version="5")
    driver.open(1, PROMPT[:9], identity=Identity(lora=lora, cache_salt="tenant"))
    driver.step()
    versions = (("lora_version", "5"), ("model_version", "2"))
    first = hasher.block_hash(
        hasher.root,
        PROMPT[:4],
        (("lora", "sql", "/sql"), ("cache_salt", "tenant"), *versions),
    )
    second = hasher.block_hash(first, PROMPT[4:8], (("lora", "sql", "/sql"), *versions))
    assert driver.published() == {1: first, 2: second}


def test_s22_a_shared_block_of_an_older_version_is_withheld_in_the_step_that_reads_it() -> None:
    """Both holders close in one step, one of them after it was planned."""
    driver = Driver(block_count=7)
    driver.open(1, [1, 2, 3, 4, 5])
    driver.open(2, [1, 2, 3, 4, 6])
    driver.pool.set_model_version("2")
    driver.step()
    refused = driver.step(
        decode_entry((2, 5, 5, [7])), close_entry(2), close_entry(1), open_entry(3, [9] * 17)
    ).outcomes[-1]
    assert isinstance(refused, Refusal)
    assert dict(refused.numbers) == {"needed_count": 5, "available_count": 4}
