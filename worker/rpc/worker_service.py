"""What clients call: answers as streams, token counts, and the worker's description."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from prefixd.v1 import worker_pb2, worker_pb2_grpc
from prefixd.worker.engine import Engine
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.prompt import PromptReader
from prefixd.worker.reload import WeightReloader
from prefixd.worker.rpc.answer_messages import part_message
from prefixd.worker.rpc.controller_client import ControllerClient
from prefixd.worker.rpc.generate_request import read_prompt
from prefixd.worker.rpc.generation_factory import GenerationFactory
from prefixd.worker.rpc.step_messages import lora_message

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What never changes while the worker runs."""

    version: str
    model_name: str
    pool_name: str
    controller_address: str
    attention_backend: str
    device: str
    dtype: str
    kv_dtype: str
    token_byte_count: int
    rank_count: int
    block_count: int
    block_size: int
    context_token_count_max: int
    vocabulary_size: int
    chunk_token_count_max: int
    loras: tuple[LoraIdentity, ...]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. A call owns its answers: when it ends, so do their sequences."""

    def __init__(
        self,
        engine: Engine,
        client: ControllerClient,
        reader: PromptReader,
        factory: GenerationFactory,
        reloader: WeightReloader,
        description: WorkerDescription,
    ) -> None:
        self._engine = engine
        self._client = client
        self._reader = reader
        self._factory = factory
        self._reloader = reloader
        self._description = description

    async def Generate(
        self, request: worker_pb2.GenerateRequest, _context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Streams answers."""
        # A full worker refuses at once; only what it may take in is worth tokenizing.
        self._engine.check_room(1)
        generation = await self._factory.make(request)
        self._engine.submit(generation)
        try:
            async for part in generation.stream.parts():
                yield part_message(part)
        finally:
            self._engine.cancel(generation)

    async def CountTokens(
        self, request: worker_pb2.CountTokensRequest, _context: Context
    ) -> worker_pb2.CountTokensResponse:
        """Counts a prompt's tokens."""
        token_ids = await asyncio.to_thread(read_prompt, request.prompt, self._reader)
        return worker_pb2.CountTokensResponse(token_count=len(token_ids), token_ids=token_ids)

    async def GetWorkerInfo(
        self, _request: worker_pb2.GetWorkerInfoRequest, _context: Context
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describes the worker."""
        description, statistics = self._description, self._engine.statistics
        registration = self._client.registration
        return worker_pb2.GetWorkerInfoResponse(
            version=description.version,
            model_name=description.model_name,
            model_version=self._engine.model_version,
            pool_name=description.pool_name,
            controller_address=description.controller_address,
            epoch=registration.epoch if registration else 0,
            attention_backend=description.attention_backend,
            device=description.device,
            dtype=description.dtype,
            kv_dtype=description.kv_dtype,
            token_byte_count=description.token_byte_count,
            rank_count=description.rank_count,
            block_count=description.block_count,
            block_size=description.block_size,
            context_token_count_max=description.context_token_count_max,
            vocabulary_size=description.vocabulary_size,
            running_sequence_count=statistics.running_sequence_count,
            waiting_sequence_count=statistics.waiting_sequence_count,
            prefill_token_count=statistics.prefill_token_count,
            decode_token_count=statistics.decode_token_count,
            preemption_count=statistics.preemption_count,
            chunk_token_count_max=description.chunk_token_count_max,
            lora_adapters=map(lora_message, description.loras),
        )

    async def ReloadWeights(
        self, request: worker_pb2.ReloadWeightsRequest, _context: Context
    ) -> worker_pb2.ReloadWeightsResponse:
        """Replaces the model's weights."""
        reloaded = await self._reloader.reload(
            model_version=request.model_version, folder=request.folder
        )
        return worker_pb2.ReloadWeightsResponse(
            previous_model_version=reloaded.previous_model_version,
            dropped_block_count=reloaded.dropped_block_count,
        )
