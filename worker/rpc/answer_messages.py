"""Parts of answers as protobuf messages."""

from types import MappingProxyType

from prefixd.v1 import worker_pb2
from prefixd.worker.answer import (
    Finished,
    FinishReason,
    Part,
    PromptLogprobs,
    Started,
    TextChunk,
)

FINISH_REASONS = MappingProxyType(
    {
        FinishReason.END_OF_SEQUENCE: worker_pb2.FINISH_REASON_END_OF_SEQUENCE,
        FinishReason.STOP_STRING: worker_pb2.FINISH_REASON_STOP_STRING,
        FinishReason.TOKEN_COUNT_MAX: worker_pb2.FINISH_REASON_TOKEN_COUNT_MAX,
        FinishReason.CONTEXT_LENGTH: worker_pb2.FINISH_REASON_CONTEXT_LENGTH,
    }
)


def part_message(part: Part) -> worker_pb2.GenerateResponse:
    """A part as a message of the stream."""
    match part:
        case Started():
            return worker_pb2.GenerateResponse(started=_started(part))
        case PromptLogprobs():
            logprobs = worker_pb2.PromptLogprobs(logprobs=part.logprobs)
            return worker_pb2.GenerateResponse(prompt_logprobs=logprobs)
        case TextChunk():
            chunk = worker_pb2.GenerateChunk(
                text=part.text, token_ids=part.token_ids, sample_index=part.sample_index
            )
            return worker_pb2.GenerateResponse(chunk=chunk)
        case Finished():
            return worker_pb2.GenerateResponse(finished=_finished(part))


def _started(part: Started) -> worker_pb2.GenerateStarted:
    return worker_pb2.GenerateStarted(
        sequence_id=part.sequence_id,
        prompt_token_count=len(part.prompt_token_ids),
        cached_token_count=part.cached_token_count,
        prompt_token_ids=part.prompt_token_ids,
    )


def _finished(part: Finished) -> worker_pb2.GenerateFinished:
    finished = worker_pb2.GenerateFinished(
        finish_reason=FINISH_REASONS[part.reason],
        prompt_token_count=part.prompt_token_count,
        cached_token_count=part.cached_token_count,
        generated_token_count=part.generated_token_count,
        block_count=part.block_count,
        decode_tokens_per_second=part.decode_tokens_per_second,
        preemption_count=part.preemption_count,
        stop_string=part.stop_string,
        draft_token_count=part.draft_token_count,
        accepted_draft_token_count=part.accepted_draft_token_count,
        sample_index=part.sample_index,
        score=part.score,
    )
    finished.time_to_first_token.FromNanoseconds(round(part.time_to_first_token_s * 1e9))
    return finished
