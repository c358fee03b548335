"""Every unary call as a value: which method, what to send, how to read the answer.

The synchronous and the asyncio client both run these; nothing here waits or connects.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from prefixd.clients import convert, results
from prefixd.clients.encoding import encodes
from prefixd.v1 import admin_pb2, cache_pb2, inspect_pb2

PUBLISHED_PAGE_SIZE = 1_000
"""Rows per page where a whole pool is read: the server's largest page."""

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Call(Generic[ResponseT, ResultT]):
    """One unary call that is ready to run."""

    method: str
    request: Message
    response_type: type[ResponseT]
    read: Callable[[ResponseT], ResultT]


def method_path(file: FileDescriptor, service: str, method: str) -> str:
    """The path of a method; KeyError where the protos have none of this name."""
    return f"/{file.services_by_name[service].full_name}/{_method(file, service, method)}"


@encodes
def server_info() -> Call[inspect_pb2.GetServerInfoResponse, results.ServerInfo]:
    """InspectService.GetServerInfo."""
    return Call(
        _inspect("GetServerInfo"),
        inspect_pb2.GetServerInfoRequest(),
        inspect_pb2.GetServerInfoResponse,
        convert.server_info,
    )


@encodes
def pools(
    page_token: str, *, page_size: int
) -> Call[inspect_pb2.ListPoolsResponse, results.Page[results.Pool]]:
    """InspectService.ListPools."""
    return Call(
        _inspect("ListPools"),
        inspect_pb2.ListPoolsRequest(page_token=page_token, page_size=page_size),
        inspect_pb2.ListPoolsResponse,
        lambda answer: results.Page(
            tuple(convert.pool(row) for row in answer.pools), answer.next_page_token
        ),
    )


@encodes
def pool(pool_name: str) -> Call[inspect_pb2.GetPoolResponse, results.Pool]:
    """InspectService.GetPool."""
    return Call(
        _inspect("GetPool"),
        inspect_pb2.GetPoolRequest(pool_name=pool_name),
        inspect_pb2.GetPoolResponse,
        lambda answer: convert.pool(answer.pool),
    )


@encodes
def sequences(
    page_token: str, *, pool_name: str, page_size: int
) -> Call[inspect_pb2.ListSequencesResponse, results.Page[results.Sequence]]:
    """InspectService.ListSequences."""
    return Call(
        _inspect("ListSequences"),
        inspect_pb2.ListSequencesRequest(
            pool_name=pool_name, page_token=page_token, page_size=page_size
        ),
        inspect_pb2.ListSequencesResponse,
        lambda answer: results.Page(
            tuple(convert.sequence(row) for row in answer.sequences),
            answer.next_page_token,
            answer.revision,
        ),
    )


@encodes
def sequence(
    *, pool_name: str, sequence_id: str
) -> Call[inspect_pb2.GetSequenceResponse, results.SequenceTables]:
    """InspectService.GetSequence."""
    return Call(
        _inspect("GetSequence"),
        inspect_pb2.GetSequenceRequest(pool_name=pool_name, sequence_id=sequence_id),
        inspect_pb2.GetSequenceResponse,
        convert.sequence_tables,
    )


@encodes
def blocks(
    page_token: str, *, pool_name: str, state: results.BlockState | None, page_size: int
) -> Call[inspect_pb2.ListBlocksResponse, results.Page[results.Block]]:
    """InspectService.ListBlocks."""
    return Call(
        _inspect("ListBlocks"),
        inspect_pb2.ListBlocksRequest(
            pool_name=pool_name,
            page_token=page_token,
            page_size=page_size,
            state=_state_message(state),
        ),
        inspect_pb2.ListBlocksResponse,
        lambda answer: results.Page(
            tuple(convert.block(row) for row in answer.blocks),
            answer.next_page_token,
            answer.revision,
        ),
    )


@encodes
def block(
    *, pool_name: str, block_id: int
) -> Call[inspect_pb2.GetBlockResponse, results.BlockHolders]:
    """InspectService.GetBlock."""
    return Call(
        _inspect("GetBlock"),
        inspect_pb2.GetBlockRequest(pool_name=pool_name, block_id=block_id),
        inspect_pb2.GetBlockResponse,
        convert.block_holders,
    )


@encodes
def free_blocks(pool_name: str) -> Call[inspect_pb2.ListFreeBlocksResponse, results.FreeOrder]:
    """InspectService.ListFreeBlocks."""
    return Call(
        _inspect("ListFreeBlocks"),
        inspect_pb2.ListFreeBlocksRequest(pool_name=pool_name),
        inspect_pb2.ListFreeBlocksResponse,
        convert.free_order,
    )


@encodes
def match_prefix(
    *, pool_name: str, token_ids: SequenceOf[int], identity: results.Identity | None
) -> Call[cache_pb2.MatchPrefixResponse, results.PrefixMatch]:
    """CacheService.MatchPrefix."""
    request = cache_pb2.MatchPrefixRequest(pool_name=pool_name, token_ids=token_ids)
    if identity is not None:
        request.identity.CopyFrom(convert.identity_message(identity))
    return Call(
        method_path(cache_pb2.DESCRIPTOR, "CacheService", "MatchPrefix"),
        request,
        cache_pb2.MatchPrefixResponse,
        convert.prefix_match,
    )


@encodes
def flush_pool(pool_name: str) -> Call[admin_pb2.FlushPoolResponse, results.Flushed]:
    """AdminService.FlushPool."""
    return Call(
        method_path(admin_pb2.DESCRIPTOR, "AdminService", "FlushPool"),
        admin_pb2.FlushPoolRequest(pool_name=pool_name),
        admin_pb2.FlushPoolResponse,
        lambda answer: results.Flushed(answer.dropped_block_count),
    )


@encodes
def published(
    page_token: str, *, pool_name: str
) -> Call[inspect_pb2.ListBlocksResponse, results.Page[str]]:
    """InspectService.ListBlocks, of which only the published digests count."""
    return Call(
        _inspect("ListBlocks"),
        inspect_pb2.ListBlocksRequest(
            pool_name=pool_name, page_token=page_token, page_size=PUBLISHED_PAGE_SIZE
        ),
        inspect_pb2.ListBlocksResponse,
        lambda answer: results.Page(
            tuple(row.hash_hex for row in answer.blocks if row.hash_hex),
            answer.next_page_token,
            answer.revision,
            answer.epoch,
        ),
    )


@encodes
def evict_blocks(
    pool_name: str, *, block_ids: Iterable[int], hashes_hex: Iterable[str]
) -> Call[admin_pb2.EvictBlocksResponse, results.Evicted]:
    """AdminService.EvictBlocks."""
    return Call(
        method_path(admin_pb2.DESCRIPTOR, "AdminService", "EvictBlocks"),
        admin_pb2.EvictBlocksRequest(
            pool_name=pool_name, block_ids=block_ids, hashes_hex=hashes_hex
        ),
        admin_pb2.EvictBlocksResponse,
        lambda answer: results.Evicted(
            answer.dropped_block_count, answer.held_block_count, answer.revision
        ),
    )


@encodes
def verify_pool(pool_name: str) -> Call[admin_pb2.VerifyPoolResponse, results.Verified]:
    """AdminService.VerifyPool."""
    return Call(
        method_path(admin_pb2.DESCRIPTOR, "AdminService", "VerifyPool"),
        admin_pb2.VerifyPoolRequest(pool_name=pool_name),
        admin_pb2.VerifyPoolResponse,
        lambda answer: results.Verified(
            epoch=answer.epoch,
            revision=answer.revision,
            invariants=tuple(answer.invariants),
            block_count=answer.block_count,
            cached_block_count=answer.cached_block_count,
            digest_count=answer.digest_count,
            sequence_count=answer.sequence_count,
        ),
    )


def _inspect(method: str) -> str:
    return method_path(inspect_pb2.DESCRIPTOR, "InspectService", method)


def _method(file: FileDescriptor, service: str, method: str) -> str:
    return file.services_by_name[service].methods_by_name[method].name


def _state_message(state: results.BlockState | None) -> inspect_pb2.BlockState.ValueType:
    if state is None:
        return inspect_pb2.BLOCK_STATE_UNSPECIFIED
    return inspect_pb2.BlockState.Value(f"BLOCK_STATE_{state.name}")


WATCH_EVENTS_PATH = _inspect("WatchEvents")
"""Path of the stream of a pool's events."""
