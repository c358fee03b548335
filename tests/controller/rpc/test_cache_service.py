from prefixd.v1 import cache_pb2, inspect_pb2, pool_pb2, types_pb2
from tests.support.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    fork_entry,
    open_entry,
    refused,
)

PROMPT = list(range(100, 110))


def match(driver: Driver, token_ids, **fields) -> cache_pb2.MatchPrefixResponse:
    """Asks how much of a prompt is cached."""
    return driver.stubs.cache.MatchPrefix(
        cache_pb2.MatchPrefixRequest(pool_name=driver.pool_name, token_ids=token_ids, **fields)
    )


def test_opened_sequence_gets_blocks_and_slots(calls):
    """A cold open of ten tokens gets the first three blocks and the slots of all its tokens."""
    driver = Driver(calls)
    response = driver.step(open_entry(1, PROMPT))
    plan = response.outcomes[0].open.plan
    assert (plan.handle, plan.cached.end_token) == (1, 0)
    assert (plan.scheduled.start_token, plan.scheduled.end_token) == (0, 10)
    assert list(plan.groups[0].block_ids) == [1, 2, 3]
    slots = plan.groups[0].slots
    assert (list(slots.first_slots), list(slots.slot_counts)) == ([4], [10])
    assert response.available_block_count == 60


def test_prefix_of_a_written_prompt_is_matched(calls):
    """Once its step is confirmed, an equal prompt finds all whole blocks but the last token's."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    outcome = driver.step(open_entry(2, PROMPT)).outcomes[0].open
    assert (outcome.published_token_count, outcome.pending_token_count) == (8, 0)
    assert list(outcome.plan.groups[0].block_ids)[:2] == [1, 2]


def test_decode_rows_get_a_block_when_they_need_one(calls):
    """A decode row takes a block at a block's edge, and none inside a block."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT), open_entry(2, [1, 2, 3, 4]))
    response = driver.step(decode_entry((1, 10, 7), (2, 4, 8)))
    new_blocks = response.outcomes[0].decode.new_blocks[0].block_ids
    assert list(new_blocks) == [0, 5]


def test_extend_schedules_the_next_chunk(calls):
    """A chunked prompt goes on where its last chunk ended."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT, schedule_token_count_max=4))
    plan = driver.step(extend_entry(1, known=10, scheduled=4)).outcomes[0].extend.plan
    assert (plan.scheduled.start_token, plan.scheduled.end_token) == (4, 10)


def test_closed_sequence_holds_nothing(calls):
    """After a close every block is free or evictable."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    response = driver.step(close_entry(1))
    assert response.outcomes[0].WhichOneof("outcome") == "close"
    assert response.available_block_count == 63


def test_match_prefix_tells_published_and_pending_tokens(calls):
    """S10: scheduled blocks match as pending, and as published once their step is confirmed."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    pending = match(driver, PROMPT)
    assert (pending.published_token_count, pending.pending_token_count) == (0, 8)
    driver.step()
    published = match(driver, PROMPT)
    assert (published.published_token_count, published.pending_token_count) == (8, 0)
    assert published.epoch == driver.registered.epoch


def test_match_prefix_under_another_salt_finds_nothing(calls):
    """The identity on the wire keeps tenants apart."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT, identity=types_pb2.Identity(cache_salt="a")))
    driver.step()
    salted = match(driver, PROMPT, identity=types_pb2.Identity(cache_salt="a"))
    other = match(driver, PROMPT, identity=types_pb2.Identity(cache_salt="b"))
    assert (salted.published_token_count, other.published_token_count) == (8, 0)


def test_s05_identity_with_unknown_fields_is_uncacheable(calls):
    """S5: a sequence whose identity holds a field we do not know shares nothing."""
    driver = Driver(calls)
    unknown = types_pb2.Identity.FromString(b"\xf8\x3f\x01")
    driver.step(open_entry(1, PROMPT, identity=unknown))
    driver.step()
    outcome = driver.step(open_entry(2, PROMPT, identity=unknown)).outcomes[0].open
    assert outcome.published_token_count + outcome.pending_token_count == 0
    sequence = calls.inspect.GetSequence(
        inspect_pb2.GetSequenceRequest(pool_name="pool", sequence_id="sequence-1")
    ).sequence
    assert sequence.uncacheable


def test_known_step_gets_its_reply_again(calls):
    """A step sent twice is applied once, and both replies are equal."""
    driver = Driver(calls)
    request = driver.request(open_entry(1, PROMPT))
    first = calls.cache.Step(request)
    again = calls.cache.Step(request)
    assert again == first
    pool = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool
    assert (pool.applied_step_id, pool.sequence_count, pool.held_block_count) == (1, 1, 3)


def test_refused_entry_stands_among_the_outcomes(calls):
    """What the pool's state forbids is an outcome; the entries around it are applied."""
    driver = Driver(calls, block_count=3)
    response = driver.step(
        open_entry(1, [1, 2, 3, 4, 5]), open_entry(2, [9]), close_entry(7), open_entry(3, [1] * 40)
    )
    kinds = [outcome.WhichOneof("outcome") for outcome in response.outcomes]
    assert kinds == ["open", "refusal", "refusal", "refusal"]
    exhausted = response.outcomes[1].refusal
    assert dict(exhausted.numbers)["available_count"] == 0
    assert dict(exhausted.numbers)["needed_count"] == 1


def test_failed_step_cuts_its_sequences(calls):
    """A failed step leaves the ids used and reports what every sequence lost."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    response = driver.step(failed_step_id=1, failed_step_id_last=1, executed_step_id=0)
    cut = response.cut_sequences[0]
    assert (cut.handle, cut.known_count, cut.scheduled_count) == (1, 10, 0)
    plan = (
        driver.step(extend_entry(1, known=10, scheduled=0), executed_step_id=2)
        .outcomes[0]
        .extend.plan
    )
    assert (plan.scheduled.start_token, plan.scheduled.end_token) == (0, 10)


def test_fork_shares_blocks_and_its_writer_gets_a_copy(calls):
    """S16 over the wire: the shared partial block shows both holders until one writes into it."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    plan = driver.step(fork_entry(1, 2, token_count=10)).outcomes[0].fork.plan
    assert (plan.handle, list(plan.groups[0].block_ids)) == (2, [1, 2, 3])
    assert (plan.cached.end_token, plan.scheduled.end_token) == (10, 10)
    show = inspect_pb2.GetBlockRequest(pool_name=driver.pool_name, block_id=3)
    block = calls.inspect.GetBlock(show).block
    assert (block.holder_count, block.content) == (2, inspect_pb2.BLOCK_CONTENT_PRIVATE)
    (copy,) = driver.step(decode_entry((2, 10, 7))).outcomes[0].decode.copies
    assert (copy.handle, copy.source_block_id, copy.target_block_id) == (2, 3, 4)
    assert (copy.token_count, copy.block_index) == (2, 2)
    assert calls.inspect.GetBlock(show).block.holder_count == 1


def test_sub_block_reuse_copies_the_matched_part_of_a_block(calls):
    """The option shows in the pool; the plan names what is cached and copied, to the token."""
    driver = Driver(calls, sub_block_reuse=True)
    shown = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name=driver.pool_name))
    assert shown.pool.sub_block_reuse
    driver.step(open_entry(1, PROMPT))
    opened = driver.step(open_entry(2, [*PROMPT[:7], 1, 2])).outcomes[0].open
    assert (opened.published_token_count, opened.pending_token_count) == (7, 0)
    assert opened.plan.cached.end_token == 7
    (copy,) = opened.plan.copies
    assert (copy.source_block_id, copy.target_block_id, copy.token_count) == (2, 4, 3)
    assert list(opened.plan.groups[0].block_ids) == [1, 4, 5]
    assert copy.block_index == 1
    assert match(driver, [*PROMPT[:6], 1, 2]).published_token_count == 6


def test_merged_duplicates_reach_the_driver_as_remaps(calls):
    """S15 over the wire: the response of the step that confirms a duplicate repoints its table."""
    driver = Driver(calls, merge_duplicates=True)
    shown = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name=driver.pool_name))
    assert shown.pool.merge_duplicates
    driver.step(open_entry(1, PROMPT[:8]))
    driver.step(open_entry(2, PROMPT[:8]))
    (remap,) = driver.step().remaps
    assert (remap.handle, remap.group_index, remap.block_index) == (2, 0, 1)
    assert (remap.old_block_id, remap.new_block_id) == (3, 2)


def test_new_model_version_drops_idle_blocks(calls):
    """S4 over the wire: blocks of the old version are dropped and match nothing."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step(close_entry(1))
    driver.step()
    response = calls.pool.SetModelVersion(
        pool_pb2.SetModelVersionRequest(model_version="2", **driver.key)
    )
    assert response.dropped_block_count == 2
    assert match(driver, PROMPT).published_token_count == 0


def test_prefix_match_of_no_tokens_is_refused(calls):
    """An empty prompt is an error, not a match of length 0."""
    driver = Driver(calls)
    assert refused(lambda: match(driver, [])).reason == "PROMPT_EMPTY"


def test_s23_plans_have_a_part_for_every_group(calls):
    """A window of 4 behind full attention: two tables, two columns, and the block it has passed."""
    groups = [
        types_pb2.KvGroup(kind=types_pb2.KV_GROUP_KIND_FULL_ATTENTION),
        types_pb2.KvGroup(kind=types_pb2.KV_GROUP_KIND_SLIDING_WINDOW, window_token_count=4),
    ]
    driver = Driver(calls, groups=groups)
    plan = driver.step(open_entry(1, PROMPT[:8])).outcomes[0].open.plan
    assert [list(group.block_ids) for group in plan.groups] == [[1, 2], [3, 4]]
    assert [list(group.slots.first_slots) for group in plan.groups] == [[4], [12]]
    decoded = driver.step(decode_entry((1, 8, 7))).outcomes[0].decode
    assert [list(column.block_ids) for column in decoded.new_blocks] == [[5], [6]]
    assert list(decoded.freed_blocks) == [
        types_pb2.FreedBlock(handle=1, group_index=1, block_index=0, block_id=3)
    ]
    shown = calls.inspect.GetSequence(
        inspect_pb2.GetSequenceRequest(pool_name=driver.pool_name, sequence_id="sequence-1")
    )
    assert [list(table.block_ids) for table in shown.tables] == [[1, 2, 5], [0, 4, 6]]
    block = calls.inspect.GetBlock(
        inspect_pb2.GetBlockRequest(pool_name=driver.pool_name, block_id=4)
    ).block
    assert (block.group_index, block.holder_count) == (1, 1)
