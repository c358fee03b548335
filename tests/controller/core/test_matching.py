"""What matches, and what reading costs (S3, S6 to S10)."""

import pytest

from prefixd.controller.core.messages import (
    AwaitPrefix,
    Handle,
    Identity,
    LoraAdapter,
    MultimodalItem,
    OpenOutcome,
    PrefixMatch,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    new_block_ids,
    open_entry,
)

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33, 40]


def test_s3_equal_digests_do_not_match_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that gives every block one digest makes no prompt match another's blocks."""
    driver = Driver()
    monkeypatch.setattr(
        type(driver.pool.digests), "digest", lambda self, node, offset: b"\x00" * 32
    )
    driver.open(1, PROMPT)
    driver.close(1)
    assert driver.match([*PROMPT[:3], 99, *PROMPT[4:]]) == PrefixMatch(0, 0)
    assert driver.match(PROMPT) == PrefixMatch(12, 0)


def test_s6_only_full_blocks_are_shared() -> None:
    """A prompt that leaves the cached one inside a block matches up to that block."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step()
    for common, matched in ((3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)):
        prompt = PROMPT[:common] + [90] * 8
        assert driver.match(prompt).published_token_count == matched


def test_s6_a_gap_ends_a_match() -> None:
    """Blocks behind a differing block do not match, although they are equal."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step()
    assert driver.match([*PROMPT[:4], 99, *PROMPT[5:]]) == PrefixMatch(4, 0)


@pytest.mark.parametrize(("token_count", "matched"), [(12, 8), (13, 12), (11, 8), (9, 8), (8, 4)])
def test_s7_the_last_token_is_recomputed(token_count: int, matched: int) -> None:
    """At most n - 1 tokens match, then whole blocks."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step()
    assert driver.match(PROMPT[:token_count]).published_token_count == matched
    assert driver.open(2, PROMPT[:token_count]).published_token_count == matched


def test_s8_matching_changes_nothing() -> None:
    """Asking for any prompt leaves order, references, statistics and nodes as they are."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT[:4] + [50] * 6)
    driver.close(1)
    driver.step()
    before = driver.seen()
    node_count = len(list(driver.pool.state.index.nodes()))
    for common in range(1, len(PROMPT) + 1):
        driver.match(PROMPT[:common] + [90] * 3)
        driver.match(PROMPT[:common], Identity(cache_salt="other"))
    assert driver.seen() == before
    assert len(list(driver.pool.state.index.nodes())) == node_count


def test_s9_a_skipped_read_matches_nothing_and_publishes() -> None:
    """A sequence that reads no cache computes all and counts nothing; its blocks can be matched."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.close(1)
    statistics = driver.pool.state.statistics
    opened = driver.open(2, [*PROMPT, 41, 42, 43, 44], skip_cache_read=True)
    assert opened.plan.cached.end_token == 0
    assert statistics.sequence_count == 1
    assert statistics.query_token_count == len(PROMPT)
    driver.step()
    assert driver.match([*PROMPT, 41, 42, 43, 44]).published_token_count == 16


def test_s10_a_block_matches_from_the_moment_it_is_scheduled() -> None:
    """Equal cold prompts of one step compute their prefix once; it is pending until executed."""
    driver = Driver()
    first, second = driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT)).outcomes
    assert isinstance(first, OpenOutcome)
    assert isinstance(second, OpenOutcome)
    assert (second.published_token_count, second.pending_token_count) == (0, 12)
    assert new_block_ids(second)[:3] == new_block_ids(first)[:3]
    assert driver.pending() == [1, 2, 3]
    assert driver.published() == {}
    driver.step()
    assert driver.pending() == []
    assert sorted(driver.published()) == [1, 2, 3]


def test_s10_a_position_may_be_scheduled_before_its_token_is_known() -> None:
    """The block is pending once its last token is known, and published when its step ran."""
    driver = Driver()
    driver.open(1, PROMPT[:11])
    driver.step(decode_entry((1, 11, 11, [])), executed=1)
    assert driver.pending() == []
    driver.step(decode_entry((1, 12, 11, [33])), executed=1)
    assert driver.pending() == [3]
    driver.step(executed=2)
    assert driver.pending() == []
    assert 3 in driver.published()


def test_s10_draft_tokens_are_never_pending() -> None:
    """Positions of drafts fill a block, which enters the index when its tokens are accepted."""
    driver = Driver()
    driver.open(1, PROMPT[:5])
    driver.extend(1, [], draft_token_count=3)
    assert driver.match([*PROMPT[:8], 9]) == PrefixMatch(4, 0)
    driver.extend(1, PROMPT[5:8], rollback_to_token_count=8)
    assert driver.match([*PROMPT[:8], 9]) == PrefixMatch(8, 0)


def test_s10_await_answers_with_the_sequence_that_computes_the_prefix() -> None:
    """Where enough will come from a prefilling sequence, the open changes and counts nothing."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT, schedule_token_count_max=4)
    before = driver.seen()
    asked = open_entry(2, PROMPT, await_token_count_min=8)
    assert driver.outcome(asked, executed=0) == AwaitPrefix(0, 4, 8, Handle(1))
    assert driver.seen() == before


def test_s10_await_opens_where_too_little_would_come() -> None:
    """Fewer awaitable tokens than asked for are not waited for."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT, schedule_token_count_max=4)
    assert isinstance(driver.outcome(open_entry(2, PROMPT, await_token_count_min=9)), OpenOutcome)


def test_s10_await_ignores_other_identities() -> None:
    """A prefilling sequence under another salt provides nothing."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT, schedule_token_count_max=4, identity=Identity(cache_salt="a"))
    assert isinstance(driver.outcome(open_entry(2, PROMPT, await_token_count_min=1)), OpenOutcome)


@pytest.mark.parametrize(
    "identity",
    [
        Identity(cache_salt="tenant"),
        Identity(lora=LoraAdapter("sql")),
        Identity(lora=LoraAdapter("sql", path="/v2")),
        Identity(lora=LoraAdapter("sql", version="2")),
        Identity(multimodal_items=(MultimodalItem("cat", 1, 2),)),
        Identity(prompt_embeds_digests=(b"\x07" * 32,)),
    ],
)
def test_s2_another_identity_shares_nothing(identity: Identity) -> None:
    """Every part of the identity separates, both ways round, and equal ones share."""
    driver = Driver(block_count=30)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT, identity=identity)
    driver.step()
    assert driver.table(1)[:3] != driver.table(2)[:3]
    assert driver.match(PROMPT).published_token_count == 12
    assert driver.open(3, PROMPT, identity=identity).published_token_count == 12
    assert driver.table(3)[:3] == driver.table(2)[:3]


def test_s2_blocks_before_an_image_are_shared() -> None:
    """An item changes the blocks it touches and those behind, not those in front."""
    driver = Driver(block_count=30)
    driver.open(1, PROMPT)
    driver.step()
    image = Identity(multimodal_items=(MultimodalItem("cat", 6, 3),))
    assert driver.match(PROMPT, image).published_token_count == 4
    driver.open(2, PROMPT, identity=image)
    moved = Identity(multimodal_items=(MultimodalItem("cat", 5, 4),))
    assert driver.match(PROMPT, moved) == PrefixMatch(4, 0)
    driver.step()
    assert driver.match(PROMPT, image).published_token_count == 12


def test_s5_unknown_identity_fields_make_a_sequence_uncacheable() -> None:
    """It matches nothing, publishes nothing and is not counted."""
    driver = Driver(block_count=30)
    driver.open(1, PROMPT)
    unknown = Identity(has_unknown_fields=True)
    opened = driver.open(2, PROMPT, identity=unknown)
    assert opened.plan.cached.end_token == 0
    assert driver.sequence(2).uncacheable
    driver.step()
    assert sorted(driver.published()) == [1, 2, 3]
    assert driver.match(PROMPT, unknown) == PrefixMatch(0, 0)
    assert driver.pool.state.statistics.sequence_count == 1


def test_a_pool_without_caching_publishes_and_counts_nothing() -> None:
    """With caching off every prompt is computed and every block is freed uncached."""
    driver = Driver(caching_disabled=True)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    assert driver.open(2, PROMPT).plan.cached.end_token == 0
    assert driver.published() == {}
    assert driver.pool.state.statistics.sequence_count == 0


def test_s10_matched_pending_tokens_are_written_when_their_step_is_executed() -> None:
    """The reader's written count follows the writer's step, not its own."""
    driver = Driver(block_count=20)
    driver.step(open_entry(1, PROMPT))
    driver.step(open_entry(2, PROMPT), executed=0)
    assert driver.sequence(2).written_count == 0
    driver.step(executed=1)
    assert driver.sequence(2).written_count == 12
    driver.step(executed=2)
    assert driver.sequence(2).written_count == 13


def test_s10_await_compares_identities_block_by_block() -> None:
    """Tokens in front of a differing image may be waited for, those behind may not."""
    driver = Driver(block_count=20)
    cat = Identity(multimodal_items=(MultimodalItem("cat", 9, 2),))
    dog = Identity(multimodal_items=(MultimodalItem("dog", 9, 2),))
    driver.open(1, PROMPT, identity=cat, schedule_token_count_max=1)
    waiting = open_entry(2, PROMPT, identity=dog, await_token_count_min=8)
    assert driver.outcome(waiting) == AwaitPrefix(0, 0, 8, Handle(1))
    opened = open_entry(2, PROMPT, identity=dog, await_token_count_min=9)
    assert isinstance(driver.outcome(opened), OpenOutcome)


def test_s2_extra_keys_stay_with_their_blocks_when_runs_are_split_and_joined() -> None:
    """Digests and matches of a prompt with images survive branches and evictions."""
    identity = Identity(multimodal_items=(MultimodalItem("cat", 2, 1), MultimodalItem("dog", 9, 2)))
    driver = Driver(block_count=12)
    driver.open(1, PROMPT, identity=identity)
    driver.step()
    digests = driver.published()
    driver.open(2, [*PROMPT[:8], 1, 2, 3, 4, 5], identity=identity)
    driver.step(close_entry(2))
    driver.step(close_entry(1))
    driver.open(3, [90] * 24)
    driver.open(4, [91] * 8)
    driver.close(4)
    driver.open(5, PROMPT, identity=identity, schedule_token_count_max=0)
    driver.close(5)
    assert driver.match(PROMPT, identity).published_token_count == 12
    published = driver.published()
    assert all(published[block_id] == digest for block_id, digest in digests.items())
