import base64
import json

import grpc
import pytest

from prefixd.controller.core import limits
from prefixd.v1 import inspect_pb2, types_pb2
from tests.support.driver import Driver, close_entry, extend_entry, open_entry, refused

PROMPT = list(range(100, 110))


def filled(calls, **fields) -> Driver:
    """A pool with one closed prompt of two whole blocks and one open prompt of its own."""
    driver = Driver(calls, **fields)
    driver.step(open_entry(1, PROMPT), open_entry(2, [7, 8, 9, 10, 11], sequence_id="open"))
    driver.step(close_entry(1))
    driver.step()
    return driver


def blocks(calls, **fields) -> inspect_pb2.ListBlocksResponse:
    """Lists blocks of the pool."""
    return calls.inspect.ListBlocks(inspect_pb2.ListBlocksRequest(pool_name="pool", **fields))


def test_server_info_names_every_limit(calls):
    """Every constant of the limits module that bounds a caller is reported under its name."""
    info = calls.inspect.GetServerInfo(inspect_pb2.GetServerInfoRequest())
    bounds = {
        name.lower(): value
        for name, value in vars(limits).items()
        if name.isupper() and name.endswith(("_MAX", "_MIN"))
    }
    assert bounds.items() <= dict(info.limits).items()
    assert info.hash_algorithms[0] == info.hash_algorithm == "sha256_cbor"
    assert len(bytes.fromhex(info.root_hash_hex)) == 32
    assert info.start_time.seconds > 0


def test_pool_accounts_add_up(calls):
    """Free, evictable and held blocks are all blocks but block 0."""
    filled(calls)
    pool = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool
    assert (pool.held_block_count, pool.evictable_block_count, pool.free_block_count) == (2, 2, 59)
    assert (pool.published_block_count, pool.pending_block_count) == (3, 0)
    assert (pool.sequence_count, pool.applied_step_id, pool.executed_step_id) == (1, 3, 2)
    assert pool.statistics.query_token_count == 15
    assert pool.statistics.usage == pytest.approx(2 / 63)
    assert pool.groups[0].kind == types_pb2.KV_GROUP_KIND_FULL_ATTENTION


def test_sequence_shows_its_table_and_identity(calls):
    """An operator sees a sequence's positions, its blocks and its identity."""
    driver = Driver(calls)
    identity = types_pb2.Identity(cache_salt="tenant")
    driver.step(open_entry(5, PROMPT, identity=identity, schedule_token_count_max=6))
    response = calls.inspect.GetSequence(
        inspect_pb2.GetSequenceRequest(pool_name="pool", sequence_id="sequence-5")
    )
    sequence = response.sequence
    assert (sequence.handle, sequence.known_count) == (5, 10)
    assert (sequence.scheduled_count, sequence.written_count) == (6, 0)
    assert sequence.identity == identity
    assert [list(table.block_ids) for table in response.tables] == [[1, 2]]
    assert sequence.block_count == 2


def test_block_shows_its_digest_its_parent_and_its_holders(calls):
    """A published block names its content, its parent and who holds it."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT))
    driver.step()
    first, second = (
        calls.inspect.GetBlock(inspect_pb2.GetBlockRequest(pool_name="pool", block_id=block_id))
        for block_id in (1, 2)
    )
    assert first.block.content == inspect_pb2.BLOCK_CONTENT_PUBLISHED
    assert (first.block.parent_hash_hex, second.block.parent_hash_hex) == (
        "",
        first.block.hash_hex,
    )
    assert (first.block.block_index, second.block.block_index) == (0, 1)
    assert list(second.sequence_ids) == ["sequence-1", "sequence-2"]
    assert second.block.holder_count == 2


def test_free_order_is_the_order_of_handing_out(calls):
    """S17: free blocks come first, cached ones last and tail first."""
    driver = filled(calls, block_count=8)
    response = calls.inspect.ListFreeBlocks(inspect_pb2.ListFreeBlocksRequest(pool_name="pool"))
    assert list(response.block_ids) == [3, 6, 7, 2, 1]
    plan = driver.step(open_entry(3, list(range(20)))).outcomes[0].open.plan
    assert list(plan.groups[0].block_ids) == list(response.block_ids)


def test_list_then_revision_tells_of_changes(calls):
    """The revision grows when the published set changes, and only then."""
    driver = filled(calls)
    before = blocks(calls).revision
    driver.step(open_entry(3, [1]))
    assert blocks(calls).revision == before
    driver.step(open_entry(4, [50, 51, 52, 53]))
    driver.step()
    assert blocks(calls).revision > before


def test_reading_changes_nothing(calls):
    """S8 for operators: no read moves a block, a counter or a revision."""
    filled(calls)
    request = inspect_pb2.GetPoolRequest(pool_name="pool")
    before = calls.inspect.GetPool(request)
    order = inspect_pb2.ListFreeBlocksRequest(pool_name="pool")
    free_before = calls.inspect.ListFreeBlocks(order)
    blocks(calls)
    calls.inspect.GetBlock(inspect_pb2.GetBlockRequest(pool_name="pool", block_id=1))
    calls.inspect.ListSequences(inspect_pb2.ListSequencesRequest(pool_name="pool"))
    calls.inspect.ListPools(inspect_pb2.ListPoolsRequest())
    assert calls.inspect.GetPool(request) == before
    assert calls.inspect.ListFreeBlocks(order) == free_before


def test_pages_of_blocks_join_to_the_whole_list(calls):
    """Pages have the wished size, ascend by id, and end with an empty token."""
    Driver(calls, block_count=12)
    seen, token, sizes = [], "", []
    while True:
        page = blocks(calls, page_size=4, page_token=token)
        seen.extend(block.block_id for block in page.blocks)
        sizes.append(len(page.blocks))
        token = page.next_page_token
        if not token:
            break
    assert (seen, sizes) == (list(range(1, 12)), [4, 4, 3])


def test_exact_last_page_has_no_successor(calls):
    """A page that ends with the last row says so."""
    Driver(calls, block_count=9)
    token = blocks(calls, page_size=4).next_page_token
    assert blocks(calls, page_size=4, page_token=token).next_page_token == ""


def test_blocks_can_be_listed_by_state(calls):
    """A filter keeps the blocks of one state."""
    filled(calls)
    held = blocks(calls, state=inspect_pb2.BLOCK_STATE_HELD)
    evictable = blocks(calls, state=inspect_pb2.BLOCK_STATE_EVICTABLE)
    assert [block.block_id for block in held.blocks] == [4, 5]
    assert [block.block_id for block in evictable.blocks] == [1, 2]


def test_pools_are_listed_by_name(calls):
    """Pools page by name."""
    for name in ("c", "a", "b"):
        Driver(calls, name)
    first = calls.inspect.ListPools(inspect_pb2.ListPoolsRequest(page_size=2))
    second = calls.inspect.ListPools(
        inspect_pb2.ListPoolsRequest(page_size=2, page_token=first.next_page_token)
    )
    assert [pool.pool_name for pool in first.pools] == ["a", "b"]
    assert [pool.pool_name for pool in second.pools] == ["c"]
    assert second.next_page_token == ""


def test_sequences_are_listed_by_id(calls):
    """Sequences page by id, and a sequence that closes between pages disturbs none."""
    driver = Driver(calls)
    driver.step(*(open_entry(handle, [handle]) for handle in range(1, 6)))
    first = calls.inspect.ListSequences(
        inspect_pb2.ListSequencesRequest(pool_name="pool", page_size=2)
    )
    driver.step(close_entry(2), close_entry(3))
    second = calls.inspect.ListSequences(
        inspect_pb2.ListSequencesRequest(
            pool_name="pool", page_size=2, page_token=first.next_page_token
        )
    )
    names = [sequence.sequence_id for sequence in [*first.sequences, *second.sequences]]
    assert names == ["sequence-1", "sequence-2", "sequence-4", "sequence-5"]


def test_wish_above_the_maximum_is_read_as_the_maximum(calls):
    """A page has at most 1,000 rows, and 100 where no size is named."""
    Driver(calls, block_count=1_500)
    assert len(blocks(calls, page_size=1_400).blocks) == 1_000
    assert len(blocks(calls).blocks) == 100


def test_negative_page_size_is_refused(calls):
    """A negative size names the field."""
    Driver(calls)
    error = refused(lambda: blocks(calls, page_size=-1))
    assert (error.reason, error.fields) == ("FIELD_INVALID", ("page_size",))


def test_unknown_state_filter_is_refused(calls):
    """A state that this controller does not know is not read as all."""
    Driver(calls)
    assert refused(lambda: blocks(calls, state=17)).fields == ("state",)


@pytest.mark.parametrize(
    "token",
    ["x", "bm90IGpzb24=", "é", "WzEsIDJd", base64.urlsafe_b64encode(b"[" * 100_000).decode()],
    ids=["short", "no json", "no ascii", "no text", "nested"],
)
def test_made_up_page_token_is_refused(calls, token):
    """A token that no listing made names the field."""
    Driver(calls)
    error = refused(lambda: blocks(calls, page_token=token))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.fields) == ("PAGE_TOKEN_INVALID", ("page_token",))


@pytest.mark.parametrize("key", ["", "-1", "x", "9" * 30, "9" * 5_000])
def test_page_token_with_an_impossible_block_is_refused(calls, key):
    """A token of the right listing that names no block is no token of ours."""
    epoch = Driver(calls).registered.epoch
    text = json.dumps(["blocks", "pool", epoch, 0, key])
    token = base64.urlsafe_b64encode(text.encode()).decode()
    assert refused(lambda: blocks(calls, page_token=token)).reason == "PAGE_TOKEN_INVALID"


def test_page_token_is_bound_to_listing_filter_and_epoch(calls):
    """A token works for the listing that made it, and no longer once the pool has a new epoch."""
    driver = Driver(calls)
    driver.step(open_entry(1, [1]), open_entry(2, [2]))
    token = blocks(calls, page_size=4).next_page_token
    sequences = inspect_pb2.ListSequencesRequest(pool_name="pool", page_token=token)
    elsewhere = [
        lambda: calls.inspect.ListSequences(sequences),
        lambda: calls.inspect.ListPools(inspect_pb2.ListPoolsRequest(page_token=token)),
        lambda: blocks(calls, page_token=token, state=inspect_pb2.BLOCK_STATE_FREE),
    ]
    assert [refused(call).reason for call in elsewhere] == ["PAGE_TOKEN_INVALID"] * 3
    assert blocks(calls, page_size=4, page_token=token).blocks[0].block_id == 5
    Driver(calls)
    assert refused(lambda: blocks(calls, page_token=token)).reason == "PAGE_TOKEN_INVALID"


@pytest.mark.parametrize("block_id", [0, 64, -1])
def test_block_outside_the_pool_is_not_found(calls, block_id):
    """Block 0 is never shown, nor is one beyond the pool."""
    Driver(calls)
    request = inspect_pb2.GetBlockRequest(pool_name="pool", block_id=block_id)
    error = refused(lambda: calls.inspect.GetBlock(request))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "BLOCK_NOT_FOUND")


def test_unknown_sequence_is_not_found(calls):
    """A sequence that is closed or never was is not found."""
    Driver(calls)
    request = inspect_pb2.GetSequenceRequest(pool_name="pool", sequence_id="nobody")
    assert refused(lambda: calls.inspect.GetSequence(request)).reason == "SEQUENCE_NOT_FOUND"


@pytest.mark.parametrize(
    "call_name",
    ["GetPool", "ListSequences", "GetSequence", "ListBlocks", "GetBlock", "ListFreeBlocks"],
)
def test_unknown_pool_is_not_found(calls, call_name):
    """Every read of a pool says so where there is none."""
    request = getattr(inspect_pb2, f"{call_name}Request")(pool_name="nowhere")
    error = refused(lambda: getattr(calls.inspect, call_name)(request))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")


def test_cut_sequence_is_shown_as_cut(calls):
    """After a failed step a sequence is shown as cut until its extend."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step(failed_step_id=1, failed_step_id_last=1, executed_step_id=0)
    request = inspect_pb2.GetSequenceRequest(pool_name="pool", sequence_id="sequence-1")
    assert calls.inspect.GetSequence(request).sequence.cut
    driver.step(extend_entry(1, known=10, scheduled=0))
    assert not calls.inspect.GetSequence(request).sequence.cut
