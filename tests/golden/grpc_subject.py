"""A pool behind gRPC as the subject of a trace: steps on a session, state by inspection."""

from collections.abc import Iterator
from queue import SimpleQueue

import grpc

from prefixd.controller.core.messages import PoolSpec, Step, StepReply
from prefixd.v1 import admin_pb2, cache_pb2, events_pb2, inspect_pb2, pool_pb2
from tests.golden.subjects import State
from tests.golden.traces import BlockEvent
from tests.golden.wire import step_reply, step_request
from tests.support.controller import Stubs

PAGE_SIZE = 7
"""Rows per page: small and odd, so that listings are read over several pages."""
DEADLINE_S = 30.0


class GrpcSubject:
    """A freshly registered pool and its open session."""

    def __init__(self, stubs: Stubs, spec: PoolSpec) -> None:
        self._stubs = stubs
        self._spec = spec
        registered = stubs.pool.RegisterPool(
            pool_pb2.RegisterPoolRequest(
                pool_name=spec.pool_name,
                block_count=spec.block_count,
                block_size=spec.block_size,
                caching_disabled=spec.caching_disabled,
            ),
            timeout=DEADLINE_S,
        )
        self._requests: SimpleQueue[cache_pb2.SessionRequest | None] = SimpleQueue()
        self._responses = stubs.cache.Session(iter(self._requests.get, None))
        start = cache_pb2.SessionStart(
            pool_name=spec.pool_name,
            epoch=registered.epoch,
            session_token=registered.session_token,
        )
        self._release = pool_pb2.ReleasePoolRequest(
            pool_name=spec.pool_name,
            epoch=registered.epoch,
            session_token=registered.session_token,
        )
        answer = self._exchange(cache_pb2.SessionRequest(start=start))
        assert answer.WhichOneof("message") == "ready"
        self._watch = stubs.inspect.WatchEvents(
            events_pb2.WatchEventsRequest(
                pool_name=spec.pool_name,
                epoch=registered.epoch,
                after_revision=0,
                with_token_ids=True,
            )
        )
        self._through_revision = 0

    def close(self) -> None:
        """Ends the session and the watch, and releases the pool."""
        self._watch.cancel()
        self._requests.put(None)
        for _ in self._responses:
            pass
        self._stubs.pool.ReleasePool(self._release, timeout=DEADLINE_S)

    def _exchange(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        self._requests.put(request)
        answer: cache_pb2.SessionResponse = next(self._responses)
        return answer

    def apply(self, step: Step) -> StepReply:
        """Sends a step on the session."""
        answer = self._exchange(cache_pb2.SessionRequest(step=step_request(step)))
        if answer.WhichOneof("message") != "step":
            raise RuntimeError(f"step {step.step_id} was refused: {answer}")
        return step_reply(answer.step)

    def flush(self) -> bool:
        """Flushes the pool; False where it is refused."""
        try:
            self._stubs.admin.FlushPool(
                admin_pb2.FlushPoolRequest(pool_name=self._spec.pool_name), timeout=DEADLINE_S
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return False
            raise
        return True

    def state(self) -> State:
        """Reads the whole state, page by page."""
        inspect, name = self._stubs.inspect, self._spec.pool_name
        free = inspect.ListFreeBlocks(
            inspect_pb2.ListFreeBlocksRequest(pool_name=name), timeout=DEADLINE_S
        )
        cached: dict[str, list[int]] = {}
        references: dict[int, int] = {}
        for block in self._blocks():
            if block.content == inspect_pb2.BLOCK_CONTENT_PUBLISHED:
                cached.setdefault(block.hash_hex, []).append(block.block_id)
            if block.holder_count:
                references[block.block_id] = block.holder_count
        tables: dict[str, list[int]] = {}
        for sequence in self._sequences():
            answer = inspect.GetSequence(
                inspect_pb2.GetSequenceRequest(pool_name=name, sequence_id=sequence.sequence_id),
                timeout=DEADLINE_S,
            )
            (table,) = answer.tables
            tables[sequence.sequence_id] = list(table.block_ids)
        return State(tuple(free.block_ids), cached, references, tables)

    def _blocks(self) -> Iterator[inspect_pb2.Block]:
        token = ""
        while True:
            page = self._stubs.inspect.ListBlocks(
                inspect_pb2.ListBlocksRequest(
                    pool_name=self._spec.pool_name, page_size=PAGE_SIZE, page_token=token
                ),
                timeout=DEADLINE_S,
            )
            yield from page.blocks
            token = page.next_page_token
            if not token:
                return

    def _sequences(self) -> Iterator[inspect_pb2.Sequence]:
        token = ""
        while True:
            page = self._stubs.inspect.ListSequences(
                inspect_pb2.ListSequencesRequest(
                    pool_name=self._spec.pool_name, page_size=PAGE_SIZE, page_token=token
                ),
                timeout=DEADLINE_S,
            )
            yield from page.sequences
            token = page.next_page_token
            if not token:
                return

    def events(self) -> list[BlockEvent]:
        """Reads the watch up to the pool's revision."""
        pool = self._stubs.inspect.GetPool(
            inspect_pb2.GetPoolRequest(pool_name=self._spec.pool_name), timeout=DEADLINE_S
        ).pool
        events: list[BlockEvent] = []
        while self._through_revision < pool.revision:
            answer = next(self._watch)
            for event in answer.events:
                self._through_revision += 1
                assert event.revision == self._through_revision, "the revisions have a gap"
                events.extend(block_events(event))
            assert answer.through_revision == self._through_revision
        return events

    def statistics(self) -> dict[str, int]:
        """Reads the admission counters, under their names in the trace files."""
        answer = self._stubs.inspect.GetPool(
            inspect_pb2.GetPoolRequest(pool_name=self._spec.pool_name), timeout=DEADLINE_S
        )
        counted = answer.pool.statistics
        return {
            "requests": counted.sequence_count,
            "queries": counted.query_token_count,
            "hits": counted.hit_token_count,
            "preempted_requests": counted.preempted_sequence_count,
            "preempted_queries": counted.preempted_query_token_count,
            "preempted_hits": counted.preempted_hit_token_count,
        }


def block_events(event: events_pb2.PoolEvent) -> Iterator[BlockEvent]:
    """Gives the events of the single blocks that one event is about."""
    match event.WhichOneof("event"):
        case "removed":
            for digest_hex in event.removed.hashes_hex:
                yield BlockEvent("removed", last_8_bytes(digest_hex))
        case "stored":
            stored = event.stored
            parent_hex = stored.parent_hash_hex
            size = stored.block_size
            for index, digest_hex in enumerate(stored.hashes_hex):
                yield BlockEvent(
                    "stored",
                    last_8_bytes(digest_hex),
                    last_8_bytes(parent_hex) if parent_hex else None,
                    tuple(stored.token_ids[index * size : (index + 1) * size]),
                )
                parent_hex = digest_hex
        case "cleared":
            yield BlockEvent("cleared")


def last_8_bytes(digest_hex: str) -> int:
    """Returns a digest as the trace files write it: big-endian."""
    return int(digest_hex[-16:], 16)
