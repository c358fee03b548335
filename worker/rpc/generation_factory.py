"""Makes the answers that a Generate request asks for."""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from dataclasses import replace

from prefixd.v1 import worker_pb2
from prefixd.worker.answer import Answer, AnswerLimits, PartStream
from prefixd.worker.beam import BeamGeneration
from prefixd.worker.detokenizer import Detokenizer
from prefixd.worker.errors import WorkerError, field_invalid
from prefixd.worker.generation import Generation, SampledGeneration
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.prompt import PromptReader
from prefixd.worker.rpc.generate_request import (
    AnswerBounds,
    RequestShape,
    read_limits,
    read_prompt,
    read_retention_hint,
    read_sampling,
    read_shape,
    seed_of_sample,
)
from prefixd.worker.sequence import Sequence
from prefixd.worker.speculation import PromptLookup


class GenerationFactory:
    """Checks requests and makes their generations, one arrival after the other."""

    def __init__(
        self,
        reader: PromptReader,
        bounds: AnswerBounds,
        loras: tuple[LoraIdentity, ...],
        *,
        clock_s: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._bounds = bounds
        self._loras = {lora.name: lora for lora in loras}
        self._clock_s = clock_s
        self._arrivals = itertools.count(1)

    async def make(self, request: worker_pb2.GenerateRequest) -> Generation:
        """Makes the generation of a request.

        Raises:
            WorkerError: the request is refused.
        """
        arrival_s = self._clock_s()
        shape = read_shape(request)
        self._check_lora(request.lora_name)
        # A long prompt takes a while to tokenize; other streams go on meanwhile.
        token_ids = await asyncio.to_thread(read_prompt, request.prompt, self._reader)
        limits = read_limits(request, self._bounds, prompt_token_count=len(token_ids))
        if limits.stop_strings and not self._reader.has_tokenizer:
            raise WorkerError("UNSUPPORTED", "the model has no tokenizer, so no stop strings")
        if shape.beam is not None:
            return BeamGeneration(
                self._sequence(request, token_ids, limits),
                shape.beam,
                limits,
                PartStream(answer_count=shape.sample_count),
                decode=self._reader.decode,
                arrival_s=arrival_s,
            )
        return self._sampled(request, shape, token_ids, limits, arrival_s)

    def _check_lora(self, name: str) -> None:
        if name and name not in self._loras:
            known = ", ".join(sorted(self._loras)) or "none"
            raise field_invalid("lora_name", f"no adapter is called {name!r}; there are: {known}")

    def _sampled(
        self,
        request: worker_pb2.GenerateRequest,
        shape: RequestShape,
        token_ids: list[int],
        limits: AnswerLimits,
        arrival_s: float,
    ) -> SampledGeneration:
        sampling = read_sampling(request.sampling, random_seed=secrets.randbits(63))
        stream = PartStream(answer_count=shape.sample_count)
        first = self._sequence(request, token_ids, limits)
        sequences = [first, *(self._child(first, index) for index in range(1, shape.sample_count))]
        answers = [
            Answer(
                sequence,
                replace(sampling, seed=seed_of_sample(sampling.seed, index=index)),
                limits,
                Detokenizer(self._reader.decode),
                stream,
                arrival_s=arrival_s,
                sample_index=index,
            )
            for index, sequence in enumerate(sequences)
        ]
        return SampledGeneration(tuple(answers), stream)

    def _sequence(
        self, request: worker_pb2.GenerateRequest, token_ids: list[int], limits: AnswerLimits
    ) -> Sequence:
        arrival = next(self._arrivals)
        return Sequence(
            sequence_id=request.sequence_id or f"sequence-{arrival}",
            token_ids=token_ids,
            prompt_token_count=len(token_ids),
            arrival=arrival,
            cache_salt=request.cache_salt,
            lora=self._loras.get(request.lora_name),
            skip_cache_read=request.skip_cache_read or request.prompt_logprobs,
            retention_hint=read_retention_hint(request),
            wants_prompt_logits=request.prompt_logprobs,
            lookup=_lookup(request, limits, prompt_token_count=len(token_ids)),
        )

    def _child(self, first: Sequence, index: int) -> Sequence:
        lookup = first.lookup
        return Sequence(
            sequence_id=f"{first.sequence_id}/{index}",
            token_ids=list(first.token_ids),
            prompt_token_count=first.prompt_token_count,
            arrival=first.arrival,
            cache_salt=first.cache_salt,
            lora=first.lora,
            retention_hint=first.retention_hint,
            lookup=None if lookup is None else lookup.another(),
            was_opened=True,
        )


def _lookup(
    request: worker_pb2.GenerateRequest, limits: AnswerLimits, *, prompt_token_count: int
) -> PromptLookup | None:
    if request.draft_token_count_max == 0:
        return None
    return PromptLookup(
        draft_token_count_max=request.draft_token_count_max,
        token_count_end=prompt_token_count + limits.token_count_max,
    )
