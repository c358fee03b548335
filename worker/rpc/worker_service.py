"""What clients call: answers as streams, token counts, and the worker's description."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from prefixd.v1 import worker_pb2, worker_pb2_grpc
from prefixd.worker.answer import Answer, Finished, FinishReason, Part, Started, TextChunk
from prefixd.worker.detokenizer import Detokenizer
from prefixd.worker.engine import Engine
from prefixd.worker.errors import WorkerError
from prefixd.worker.prompt import PromptReader
from prefixd.worker.rpc.controller_client import ControllerClient
from prefixd.worker.rpc.generate_request import (
    AnswerBounds,
    read_limits,
    read_prompt,
    read_sampling,
)
from prefixd.worker.sequence import Sequence

Context = grpc.aio.ServicerContext[Any, Any]

FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: worker_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP_STRING: worker_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.TOKEN_COUNT_MAX: worker_pb2.FINISH_REASON_TOKEN_COUNT_MAX,
    FinishReason.CONTEXT_LENGTH: worker_pb2.FINISH_REASON_CONTEXT_LENGTH,
}


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
    block_count: int
    block_size: int
    context_token_count_max: int
    vocabulary_size: int
    chunk_token_count_max: int


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. A call owns its answer: when it ends, so does the sequence."""

    def __init__(
        self,
        engine: Engine,
        client: ControllerClient,
        reader: PromptReader,
        bounds: AnswerBounds,
        description: WorkerDescription,
        *,
        clock_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._client = client
        self._reader = reader
        self._bounds = bounds
        self._description = description
        self._clock_s = clock_s
        self._arrivals = itertools.count(1)

    async def Generate(
        self, request: worker_pb2.GenerateRequest, _context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Streams an answer."""
        arrival_s = self._clock_s()
        answer = await self._answer(request, arrival_s)
        self._engine.submit(answer)
        try:
            async for part in answer.parts():
                yield self._response(part, answer.sequence)
        finally:
            self._engine.cancel(answer)

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
            pool_name=description.pool_name,
            controller_address=description.controller_address,
            epoch=registration.epoch if registration else 0,
            attention_backend=description.attention_backend,
            device=description.device,
            dtype=description.dtype,
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
        )

    async def _answer(self, request: worker_pb2.GenerateRequest, arrival_s: float) -> Answer:
        sampling = read_sampling(request.sampling, random_seed=secrets.randbits(63))
        # A long prompt takes a while to tokenize; other streams go on meanwhile.
        token_ids = await asyncio.to_thread(read_prompt, request.prompt, self._reader)
        limits = read_limits(request, self._bounds, prompt_token_count=len(token_ids))
        if limits.stop_strings and not self._reader.has_tokenizer:
            raise WorkerError("UNSUPPORTED", "the model has no tokenizer, so no stop strings")
        arrival = next(self._arrivals)
        sequence = Sequence(
            sequence_id=request.sequence_id or f"sequence-{arrival}",
            token_ids=token_ids,
            prompt_token_count=len(token_ids),
            arrival=arrival,
            cache_salt=request.cache_salt,
            skip_cache_read=request.skip_cache_read,
        )
        detokenizer = Detokenizer(self._reader.decode)
        return Answer(sequence, sampling, limits, detokenizer, arrival_s=arrival_s)

    def _response(self, part: Part, sequence: Sequence) -> worker_pb2.GenerateResponse:
        match part:
            case Started():
                return worker_pb2.GenerateResponse(started=_started(part, sequence))
            case TextChunk():
                chunk = worker_pb2.GenerateChunk(text=part.text, token_ids=part.token_ids)
                return worker_pb2.GenerateResponse(chunk=chunk)
            case Finished():
                return worker_pb2.GenerateResponse(finished=_finished(part, sequence))


def _started(part: Started, sequence: Sequence) -> worker_pb2.GenerateStarted:
    return worker_pb2.GenerateStarted(
        sequence_id=sequence.sequence_id,
        prompt_token_count=sequence.prompt_token_count,
        cached_token_count=part.cached_token_count,
        prompt_token_ids=sequence.token_ids[: sequence.prompt_token_count],
    )


def _finished(part: Finished, sequence: Sequence) -> worker_pb2.GenerateFinished:
    finished = worker_pb2.GenerateFinished(
        finish_reason=FINISH_REASONS[part.reason],
        prompt_token_count=sequence.prompt_token_count,
        cached_token_count=part.cached_token_count,
        generated_token_count=part.generated_token_count,
        block_count=part.block_count,
        decode_tokens_per_second=part.decode_tokens_per_second,
        preemption_count=part.preemption_count,
        stop_string=part.stop_string,
    )
    finished.time_to_first_token.FromNanoseconds(round(part.time_to_first_token_s * 1e9))
    return finished
