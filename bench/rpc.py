"""The controller over gRPC, in a process of its own: every time includes building the request and
reading the reply."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from bench.core import DECODE_ROW_COUNT
from bench.figures import Figure
from bench.measure import Samples, ratio_of, samples_of, without_collection
from bench.prompts import BLOCK_SIZE, PROMPT_TOKEN_COUNT, Prompts
from prefixd.clients.processes import ServerProcess
from prefixd.controller.core.messages import TokenArray
from prefixd.controller.rpc.packed import PackedColumn
from prefixd.v1 import cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc, types_pb2

ROUNDS = 300
WARM_UP_ROUNDS = 30
START_S = 30.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)

OPEN_TOKEN_IDS = PackedColumn(cache_pb2.OpenEntry, "token_ids")
HANDLES = PackedColumn(cache_pb2.DecodeEntry, "handles")
SCHEDULED_COUNTS = PackedColumn(cache_pb2.DecodeEntry, "scheduled_count_before")
TOKEN_IDS = PackedColumn(cache_pb2.DecodeEntry, "token_ids")

Fill = Callable[[cache_pb2.StepRequest], None]
"""Adds entries to a step."""
Read = Callable[[cache_pb2.StepResponse], None]
"""Reads what an engine needs of a reply."""


def nothing(_: object) -> None:
    """Adds, or reads, nothing."""


class Engine:
    """The driver of one pool: numbers its steps and confirms each with the next one."""

    def __init__(self, channel: grpc.aio.Channel, *, pool_name: str, block_count: int) -> None:
        self._cache = cache_pb2_grpc.CacheServiceStub(channel)
        self._pools = pool_pb2_grpc.PoolServiceStub(channel)
        self._pool_name = pool_name
        self._block_count = block_count
        self._step_id = 0
        self._handle = 0

    async def register(self) -> None:
        """Registers the pool."""
        self._registered = await self._pools.RegisterPool(
            pool_pb2.RegisterPoolRequest(
                pool_name=self._pool_name,
                block_count=self._block_count,
                block_size=BLOCK_SIZE,
            )
        )

    async def start_session(self) -> None:
        """Opens the stream."""
        # The stubs know the call with a request iterator only, not the one that is written to.
        self._stream: Any = self._cache.Session()  # type: ignore[call-arg]
        start = cache_pb2.SessionStart(
            pool_name=self._pool_name,
            epoch=self._registered.epoch,
            session_token=self._registered.session_token,
        )
        await self._stream.write(cache_pb2.SessionRequest(start=start))
        await self._stream.read()

    async def end_session(self) -> None:
        """Ends the stream."""
        await self._stream.done_writing()
        await self._stream.read()

    async def step(self, fill: Fill, read: Read) -> float:
        """Sends a step on the stream; returns its time in microseconds."""
        self._step_id += 1
        started = time.perf_counter_ns()
        request = cache_pb2.SessionRequest()
        request.step.step_id = self._step_id
        request.step.executed_step_id = self._step_id - 1
        fill(request.step)
        await self._stream.write(request)
        response = await self._stream.read()
        assert response.step.step_id == self._step_id, response
        read(response.step)
        return (time.perf_counter_ns() - started) / 1_000

    async def unary_step(self) -> float:
        """Sends an empty step as a call of its own; returns its time in microseconds."""
        self._step_id += 1
        started = time.perf_counter_ns()
        response = await self._cache.Step(
            cache_pb2.StepRequest(
                step_id=self._step_id,
                executed_step_id=self._step_id - 1,
                pool_name=self._pool_name,
                epoch=self._registered.epoch,
                session_token=self._registered.session_token,
            )
        )
        assert response.step_id == self._step_id
        return (time.perf_counter_ns() - started) / 1_000

    def opening(self, token_ids: TokenArray) -> Fill:
        """Returns what adds an open of another sequence to a step."""
        self._handle += 1
        handle = self._handle

        def fill(step: cache_pb2.StepRequest) -> None:
            entry = step.entries.add().open
            entry.handle = handle
            entry.sequence_id = f"sequence-{handle}"
            OPEN_TOKEN_IDS.append(entry, token_ids)

        return fill

    def closing(self) -> Fill:
        """Returns what adds a close of the last sequence to a step."""
        handle = self._handle

        def fill(step: cache_pb2.StepRequest) -> None:
            entry = step.entries.add().close
            entry.handle = handle
            entry.reason = types_pb2.CLOSE_REASON_FINISHED

        return fill


def read_open(response: cache_pb2.StepResponse) -> None:
    """Reads an open's plan into arrays."""
    (group,) = response.outcomes[0].open.plan.groups
    blocks = np.asarray(group.block_ids)
    slots = np.asarray(group.slots.first_slots), np.asarray(group.slots.slot_counts)
    assert len(blocks) == PROMPT_TOKEN_COUNT // BLOCK_SIZE
    assert len(slots) > 0


def read_decode(response: cache_pb2.StepResponse) -> None:
    """Reads a decode outcome's new blocks into an array."""
    outcome = response.outcomes[0].decode
    assert not outcome.deferred_rows
    assert len(np.asarray(outcome.new_blocks[0].block_ids)) == DECODE_ROW_COUNT


class Decoding:
    """Sequences of staggered lengths that decode together: one row in 16 completes a block."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._handles = np.arange(1, DECODE_ROW_COUNT + 1)
        self._positions = 4 * BLOCK_SIZE + np.arange(DECODE_ROW_COUNT) % BLOCK_SIZE

    async def open(self, engine: Engine) -> None:
        """Opens the sequences."""
        for token_count in self._positions.tolist():
            await engine.step(engine.opening(self._prompts.next(token_count)), nothing)

    def fill(self) -> Fill:
        """Returns what adds every sequence's next token to a step."""
        tokens = self._prompts.next(DECODE_ROW_COUNT)
        positions = self._positions
        self._positions = positions + 1

        def fill(step: cache_pb2.StepRequest) -> None:
            entry = step.entries.add().decode
            HANDLES.append(entry, self._handles)
            SCHEDULED_COUNTS.append(entry, positions)
            TOKEN_IDS.append(entry, tokens)

        return fill


async def measure_decode(channel: grpc.aio.Channel) -> dict[str, Samples]:
    """Measures decode steps and empty steps in turns on one stream."""
    blocks_per_row = 8 + (ROUNDS + WARM_UP_ROUNDS) // BLOCK_SIZE
    engine = Engine(channel, pool_name="decode", block_count=DECODE_ROW_COUNT * blocks_per_row)
    await engine.register()
    await engine.start_session()
    decoding = Decoding(Prompts(seed=3))
    await decoding.open(engine)
    durations: dict[str, list[float]] = {"empty": [], "decode": []}
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        await engine.step(nothing, nothing)  # Takes what is done behind the decode step's reply.
        durations["empty"].append(await engine.step(nothing, nothing))
        durations["decode"].append(await engine.step(decoding.fill(), read_decode))
    await engine.end_session()
    return {name: samples_of(taken[WARM_UP_ROUNDS:]) for name, taken in durations.items()}


async def measure_admission(channel: grpc.aio.Channel) -> dict[str, Samples]:
    """Measures the admission of a cached and of a new prompt and empty steps in turns."""
    engine = Engine(
        channel, pool_name="admission", block_count=16 * PROMPT_TOKEN_COUNT // BLOCK_SIZE
    )
    await engine.register()
    await engine.start_session()
    prompts = Prompts(seed=4)
    shared = prompts.next()
    await engine.step(engine.opening(shared), read_open)
    await engine.step(engine.closing(), nothing)
    durations: dict[str, list[float]] = {"empty": [], "cached": [], "uncached": []}
    for _ in range(WARM_UP_ROUNDS + ROUNDS // 2):
        await engine.step(nothing, nothing)
        durations["empty"].append(await engine.step(nothing, nothing))
        durations["cached"].append(await engine.step(engine.opening(shared), read_open))
        await engine.step(engine.closing(), nothing)
        fresh = prompts.next()
        durations["uncached"].append(await engine.step(engine.opening(fresh), read_open))
        await engine.step(engine.closing(), nothing)
    await engine.end_session()
    return {name: samples_of(taken[WARM_UP_ROUNDS:]) for name, taken in durations.items()}


async def measure_calls(channel: grpc.aio.Channel) -> dict[str, Samples]:
    """Measures empty steps on a stream and as unary calls, in turns, on a pool each."""
    streamed = Engine(channel, pool_name="stream", block_count=2)
    unary = Engine(channel, pool_name="unary", block_count=2)
    await streamed.register()
    await unary.register()
    await streamed.start_session()
    durations: dict[str, list[float]] = {"stream": [], "unary": []}
    for _ in range(WARM_UP_ROUNDS + 5 * ROUNDS):
        durations["stream"].append(await streamed.step(nothing, nothing))
        durations["unary"].append(await unary.unary_step())
    await streamed.end_session()
    return {name: samples_of(taken[WARM_UP_ROUNDS:]) for name, taken in durations.items()}


async def measure_all(address: str) -> dict[str, Samples]:
    """Takes all measurements on one channel."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        with without_collection():
            calls = await measure_calls(channel)
            decode = await measure_decode(channel)
            admission = await measure_admission(channel)
    return calls | {
        "decode": decode["decode"],
        "decode's empty": decode["empty"],
        "cached": admission["cached"],
        "uncached": admission["uncached"],
        "admission's empty": admission["empty"],
    }


def rpc_figures() -> list[Figure]:
    """Starts a controller and measures it."""
    server = ServerProcess(
        "controller",
        module="prefixd.controller",
        arguments=("--listen", "127.0.0.1:0"),
        report=nothing,
    )
    try:
        samples = asyncio.run(measure_all(server.address(timeout_s=START_S)))
    finally:
        server.stop_by(time.monotonic() + START_S)
    return [
        *_call_figures(samples["stream"], samples["unary"]),
        _against_empty(
            f"gRPC: decode step of {DECODE_ROW_COUNT} sequences",
            samples["decode"],
            samples["decode's empty"],
            target=1.8,
        ),
        _against_empty(
            "gRPC: admission of 8,192 cached tokens",
            samples["cached"],
            samples["admission's empty"],
            target=2.0,
        ),
        _against_empty(
            "gRPC: admission of 8,192 new tokens",
            samples["uncached"],
            samples["admission's empty"],
            target=None,
        ),
    ]


def _call_figures(stream: Samples, unary: Samples) -> list[Figure]:
    figures = []
    for name, samples, other_name, other in (
        ("stream", stream, "unary", unary),
        ("unary", unary, "stream", stream),
    ):
        rate, other_rate = 1e6 / samples.median_us, 1e6 / other.median_us
        figures.append(
            Figure(
                f"gRPC: empty messages one after the other, {name}",
                rate,
                "1/s",
                baseline=other_name,
                baseline_value=other_rate,
                ratio=rate / other_rate,
            )
        )
        for percent in (50, 99):
            value, base = samples.percentile_us(percent), other.percentile_us(percent)
            figures.append(
                Figure(
                    f"gRPC: empty message, {name}, p{percent}",
                    value,
                    "us",
                    baseline=other_name,
                    baseline_value=base,
                    ratio=value / base,
                )
            )
    return figures


def _against_empty(name: str, samples: Samples, empty: Samples, *, target: float | None) -> Figure:
    return Figure(
        name,
        samples.median_us,
        "us",
        baseline="an empty message",
        baseline_value=empty.median_us,
        ratio=ratio_of(samples, empty),
        target=target,
    )
