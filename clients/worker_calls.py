"""The worker's calls as values, and the reading of an answer's stream."""

from collections import defaultdict
from dataclasses import dataclass, field

from prefixd.clients import answers
from prefixd.clients.calls import Call, method_path
from prefixd.clients.convert import lora_value, named
from prefixd.clients.encoding import encodes
from prefixd.clients.errors import AnswerIncomplete
from prefixd.v1 import cache_pb2, worker_pb2

GENERATE_PATH = method_path(worker_pb2.DESCRIPTOR, "WorkerService", "Generate")
"""Path of the streaming call."""
CONTINUATIONS = {
    answers.Continuation.UNKNOWN: cache_pb2.CONTINUATION_UNSPECIFIED,
    answers.Continuation.EXPECTED: cache_pb2.CONTINUATION_EXPECTED,
    answers.Continuation.OVER: cache_pb2.CONTINUATION_OVER,
}


@encodes
def worker_info() -> Call[worker_pb2.GetWorkerInfoResponse, answers.WorkerInfo]:
    """WorkerService.GetWorkerInfo."""
    return Call(
        method_path(worker_pb2.DESCRIPTOR, "WorkerService", "GetWorkerInfo"),
        worker_pb2.GetWorkerInfoRequest(),
        worker_pb2.GetWorkerInfoResponse,
        _worker_info,
    )


@encodes
def count_tokens(
    prompt: answers.Prompt,
) -> Call[worker_pb2.CountTokensResponse, answers.TokenCount]:
    """WorkerService.CountTokens."""
    return Call(
        method_path(worker_pb2.DESCRIPTOR, "WorkerService", "CountTokens"),
        worker_pb2.CountTokensRequest(prompt=_prompt_message(prompt)),
        worker_pb2.CountTokensResponse,
        lambda answer: answers.TokenCount(answer.token_count, tuple(answer.token_ids)),
    )


@encodes
def generate_request(
    prompt: answers.Prompt, options: answers.GenerateOptions
) -> worker_pb2.GenerateRequest:
    """What WorkerService.Generate is sent."""
    return worker_pb2.GenerateRequest(
        prompt=_prompt_message(prompt),
        sampling=worker_pb2.SamplingOptions(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        ),
        token_count_max=options.token_count_max,
        stop_strings=options.stop_strings,
        ignore_end_of_sequence=options.ignore_end_of_sequence,
        cache_salt=options.cache_salt,
        skip_cache_read=options.skip_cache_read,
        sequence_id=options.sequence_id,
        prompt_logprobs=options.prompt_logprobs,
        draft_token_count_max=options.draft_token_count_max,
        lora_name=options.lora_name,
        sample_count=options.sample_count,
        beam_search=_beam_search(options.beam_search),
        retention_hint=_retention_hint(options.retention_hint),
    )


@encodes
def reload_weights(
    *, model_version: str, folder: str
) -> Call[worker_pb2.ReloadWeightsResponse, answers.Reloaded]:
    """WorkerService.ReloadWeights."""
    return Call(
        method_path(worker_pb2.DESCRIPTOR, "WorkerService", "ReloadWeights"),
        worker_pb2.ReloadWeightsRequest(model_version=model_version, folder=folder),
        worker_pb2.ReloadWeightsResponse,
        lambda answer: answers.Reloaded(answer.previous_model_version, answer.dropped_block_count),
    )


def _beam_search(search: answers.BeamSearch | None) -> worker_pb2.BeamSearch | None:
    if search is None:
        return None
    return worker_pb2.BeamSearch(beam_count=search.beam_count, length_penalty=search.length_penalty)


def _retention_hint(hint: answers.RetentionHint | None) -> cache_pb2.RetentionHint | None:
    if hint is None:
        return None
    return cache_pb2.RetentionHint(
        continuation=CONTINUATIONS[hint.continuation],
        priority=hint.priority,
        duration_ms=hint.duration_ms,
    )


@dataclass(slots=True)
class AnswerReader:
    """Puts the answers of one request together from the parts of their stream.

    `started` is set by the first part; each answer is complete with a part of its own.
    """

    sample_count: int = 1
    started: answers.Started | None = None
    _chunks: defaultdict[int, list[answers.Chunk]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _finished: dict[int, worker_pb2.GenerateFinished] = field(default_factory=dict)
    _prompt_logprobs: tuple[float, ...] | None = None

    def read(self, part: worker_pb2.GenerateResponse) -> answers.Chunk | None:
        """Takes the next part; returns it where it is a chunk."""
        match part.WhichOneof("part"):
            case "started":
                self.started = answers.Started(
                    sequence_id=part.started.sequence_id,
                    prompt_token_count=part.started.prompt_token_count,
                    cached_token_count=part.started.cached_token_count,
                    prompt_token_ids=tuple(part.started.prompt_token_ids),
                )
            case "prompt_logprobs":
                self._prompt_logprobs = tuple(part.prompt_logprobs.logprobs)
            case "chunk":
                index = part.chunk.sample_index
                chunk = answers.Chunk(part.chunk.text, tuple(part.chunk.token_ids), index)
                self._chunks[index].append(chunk)
                return chunk
            case "finished":
                self._finished[part.finished.sample_index] = part.finished
        return None

    def complete(self) -> tuple[answers.Answer, ...]:
        """The complete answers; AnswerIncomplete where the stream has not come to its end."""
        expected = set(range(self.sample_count))
        if self.started is None or set(self._finished) != expected:
            raise AnswerIncomplete("the answer's stream ended before the answer was complete")
        return tuple(
            self._answer(self.started, self._finished[index], self._chunks[index])
            for index in sorted(expected)
        )

    def _answer(
        self,
        started: answers.Started,
        finished: worker_pb2.GenerateFinished,
        chunks: list[answers.Chunk],
    ) -> answers.Answer:
        return answers.Answer(
            sequence_id=started.sequence_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=named(
                answers.FinishReason, worker_pb2.FinishReason.DESCRIPTOR, finished.finish_reason
            ),
            stop_string=finished.stop_string,
            prompt_token_count=finished.prompt_token_count,
            cached_token_count=finished.cached_token_count,
            generated_token_count=finished.generated_token_count,
            block_count=finished.block_count,
            time_to_first_token_ms=finished.time_to_first_token.ToMicroseconds() / 1_000,
            decode_tokens_per_second=finished.decode_tokens_per_second,
            preemption_count=finished.preemption_count,
            draft_token_count=finished.draft_token_count,
            accepted_draft_token_count=finished.accepted_draft_token_count,
            sample_index=finished.sample_index,
            score=finished.score if finished.HasField("score") else None,
            prompt_logprobs=self._prompt_logprobs,
        )


def _prompt_message(prompt: answers.Prompt) -> worker_pb2.Prompt:
    match prompt:
        case str():
            return worker_pb2.Prompt(text=prompt)
        case answers.TokenPrompt():
            return worker_pb2.Prompt(tokens=worker_pb2.TokenIds(token_ids=prompt.token_ids))
        case answers.ChatPrompt():
            messages = [
                worker_pb2.ChatMessage(
                    role=message.role, content=message.content, token_ids=message.token_ids
                )
                for message in prompt.messages
            ]
            return worker_pb2.Prompt(chat=worker_pb2.ChatMessages(messages=messages))


def _worker_info(message: worker_pb2.GetWorkerInfoResponse) -> answers.WorkerInfo:
    return answers.WorkerInfo(
        version=message.version,
        model_name=message.model_name,
        model_version=message.model_version,
        pool_name=message.pool_name,
        controller_address=message.controller_address,
        epoch=message.epoch,
        attention_backend=message.attention_backend,
        device=message.device,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        token_byte_count=message.token_byte_count,
        rank_count=message.rank_count,
        block_count=message.block_count,
        block_size=message.block_size,
        context_token_count_max=message.context_token_count_max,
        vocabulary_size=message.vocabulary_size,
        running_sequence_count=message.running_sequence_count,
        waiting_sequence_count=message.waiting_sequence_count,
        prefill_token_count=message.prefill_token_count,
        decode_token_count=message.decode_token_count,
        preemption_count=message.preemption_count,
        chunk_token_count_max=message.chunk_token_count_max,
        lora_adapters=tuple(lora_value(lora) for lora in message.lora_adapters),
    )
