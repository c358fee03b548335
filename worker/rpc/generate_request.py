"""Checks a Generate request and turns it into plain values."""

import math
from dataclasses import dataclass

from prefixd.v1 import cache_pb2, worker_pb2
from prefixd.worker.answer import AnswerLimits, FinishReason
from prefixd.worker.beam import BeamOptions
from prefixd.worker.errors import WorkerError, field_invalid
from prefixd.worker.limits import (
    CACHE_SALT_LENGTH_MAX,
    DRAFT_TOKENS_MAX,
    FORK_NAME_BYTES_MAX,
    LENGTH_PENALTY_MAX,
    RETENTION_MS_MAX,
    RETENTION_PRIORITY_MAX,
    SAMPLES_MAX,
    SEQUENCE_ID_BYTES_MAX,
    STOP_STRING_LENGTH_MAX,
    STOP_STRINGS_MAX,
    TOKEN_COUNT_DEFAULT,
)
from prefixd.worker.prompt import Message, PromptReader
from prefixd.worker.retention import Continuation, RetentionHint
from prefixd.worker.sampling import SamplingInvalid, SamplingOptions

CONTINUATIONS = {
    cache_pb2.CONTINUATION_UNSPECIFIED: Continuation.UNKNOWN,
    cache_pb2.CONTINUATION_EXPECTED: Continuation.EXPECTED,
    cache_pb2.CONTINUATION_OVER: Continuation.OVER,
}
SEED_MAX = 2**63 - 1
"""Largest seed that travels."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """What the model and its pool can hold.

    Attributes:
        context_token_count_max: tokens of prompt and answer together.
        slot_count: slots of the whole pool.
        end_token_ids: tokens that end an answer.
    """

    context_token_count_max: int
    slot_count: int
    end_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How many answers a request asks for.

    Attributes:
        sample_count: answers that are sent.
        beam: how they are searched; None: they are drawn.
    """

    sample_count: int
    beam: BeamOptions | None


def read_shape(request: worker_pb2.GenerateRequest) -> RequestShape:
    """How many answers are asked for.

    Raises:
        WorkerError: FIELD_INVALID.
    """
    _check_range("sample_count", request.sample_count, low=0, high=SAMPLES_MAX)
    _check_range(
        "draft_token_count_max", request.draft_token_count_max, low=0, high=DRAFT_TOKENS_MAX
    )
    sample_count = request.sample_count or 1
    byte_count = len(request.sequence_id.encode())
    beam = _read_beam(request, sample_count) if request.HasField("beam_search") else None
    has_forks = sample_count > 1 or beam is not None
    byte_count_max = SEQUENCE_ID_BYTES_MAX - (FORK_NAME_BYTES_MAX if has_forks else 0)
    if byte_count > byte_count_max:
        raise field_invalid(
            "sequence_id",
            f"a sequence id of {byte_count} bytes, but at most {byte_count_max} are taken",
            numbers={"byte_count": byte_count, "byte_count_max": byte_count_max},
        )
    return RequestShape(sample_count, beam)


def _read_beam(request: worker_pb2.GenerateRequest, sample_count: int) -> BeamOptions:
    search = request.beam_search
    _check_range("beam_search.beam_count", search.beam_count, low=2, high=SAMPLES_MAX)
    _check_range("sample_count", sample_count, low=1, high=search.beam_count)
    penalty = _as_written(search.length_penalty) if search.HasField("length_penalty") else 1.0
    if not -LENGTH_PENALTY_MAX <= penalty <= LENGTH_PENALTY_MAX:  # also refuses NaN
        raise field_invalid(
            "beam_search.length_penalty",
            f"length_penalty is {penalty}, but must be between -{LENGTH_PENALTY_MAX:g} and"
            f" {LENGTH_PENALTY_MAX:g}",
            numbers={
                "length_penalty": penalty,
                "length_penalty_min": -LENGTH_PENALTY_MAX,
                "length_penalty_max": LENGTH_PENALTY_MAX,
            },
        )
    for field, is_set in (
        ("sampling.temperature", request.sampling.temperature != 0),
        ("stop_strings", bool(request.stop_strings)),
        ("draft_token_count_max", request.draft_token_count_max != 0),
    ):
        if is_set:
            raise field_invalid(field, f"beam search goes without {field}")
    return BeamOptions(search.beam_count, penalty, sample_count)


def seed_of_sample(seed: int, *, index: int) -> int:
    """The seed of one of several answers."""
    return (seed + index) % (SEED_MAX + 1)


def read_prompt(prompt: worker_pb2.Prompt, reader: PromptReader) -> list[int]:
    """The prompt's token ids.

    Raises:
        WorkerError: PROMPT_EMPTY, TOKEN_ID_INVALID, FIELD_INVALID or UNSUPPORTED.
    """
    match prompt.WhichOneof("form"):
        case "text":
            return reader.text(prompt.text)
        case "chat":
            return reader.chat(
                [
                    Message(message.role, message.content, tuple(message.token_ids))
                    for message in prompt.chat.messages
                ]
            )
        case "tokens":
            return reader.tokens(prompt.tokens.token_ids, field="prompt.tokens.token_ids")
        case _:
            raise WorkerError("PROMPT_EMPTY", "the request holds no prompt", field="prompt")


def read_sampling(options: worker_pb2.SamplingOptions, *, random_seed: int) -> SamplingOptions:
    """The sampling options; ``random_seed`` serves where the request names none.

    Raises:
        WorkerError: FIELD_INVALID.
    """
    seed = options.seed if options.HasField("seed") else random_seed
    if not 0 <= seed <= SEED_MAX:
        raise field_invalid(
            "sampling.seed", f"seed is {seed}, but must not be negative", numbers={"seed": seed}
        )
    try:
        return SamplingOptions(
            temperature=_as_written(options.temperature),
            top_k=options.top_k,
            top_p=_as_written(options.top_p) if options.HasField("top_p") else 1.0,
            seed=seed,
        )
    except SamplingInvalid as error:
        raise field_invalid(f"sampling.{error.field}", str(error), numbers=error.numbers) from error


def read_retention_hint(request: worker_pb2.GenerateRequest) -> RetentionHint | None:
    """What the client knows about later use of the blocks.

    Raises:
        WorkerError: FIELD_INVALID.
    """
    if not request.HasField("retention_hint"):
        return None
    hint = request.retention_hint
    continuation = CONTINUATIONS.get(hint.continuation)
    if continuation is None:
        raise field_invalid(
            "retention_hint.continuation",
            f"retention_hint.continuation must be a known one, not {hint.continuation}",
            numbers={"continuation": hint.continuation},
        )
    _check_range("retention_hint.priority", hint.priority, low=0, high=RETENTION_PRIORITY_MAX)
    _check_range("retention_hint.duration_ms", hint.duration_ms, low=0, high=RETENTION_MS_MAX)
    return RetentionHint(continuation, hint.priority, hint.duration_ms)


def read_limits(
    request: worker_pb2.GenerateRequest, bounds: AnswerBounds, *, prompt_token_count: int
) -> AnswerLimits:
    """When the answer is over.

    Raises:
        WorkerError: CONTEXT_LENGTH_EXCEEDED, SEQUENCE_EXCEEDS_POOL or FIELD_INVALID.
    """
    _check_strings(request)
    if request.token_count_max < 0:
        raise field_invalid(
            "token_count_max",
            f"token_count_max is {request.token_count_max}, but must be at least 0",
            numbers={"token_count_max": request.token_count_max},
        )
    wanted = request.token_count_max or 1
    if prompt_token_count + wanted > bounds.context_token_count_max:
        raise WorkerError(
            "CONTEXT_LENGTH_EXCEEDED",
            f"{prompt_token_count} prompt tokens and an answer of {wanted} do not fit the model's"
            f" context of {bounds.context_token_count_max}",
            numbers={
                "prompt_token_count": prompt_token_count,
                "token_count_max": wanted,
                "context_token_count_max": bounds.context_token_count_max,
            },
            field="prompt",
        )
    # The last token is never computed, so it needs no slot.
    if prompt_token_count + wanted - 1 > bounds.slot_count:
        raise WorkerError(
            "SEQUENCE_EXCEEDS_POOL",
            f"{prompt_token_count} prompt tokens and an answer of {wanted} do not fit the pool's"
            f" {bounds.slot_count} slots",
            numbers={
                "prompt_token_count": prompt_token_count,
                "token_count_max": wanted,
                "slot_count": bounds.slot_count,
            },
            field="prompt",
        )
    room = min(bounds.context_token_count_max, bounds.slot_count + 1) - prompt_token_count
    token_count_max = request.token_count_max or min(TOKEN_COUNT_DEFAULT, room)
    is_cut_short = not request.token_count_max and room < TOKEN_COUNT_DEFAULT
    return AnswerLimits(
        token_count_max=token_count_max,
        reason_at_max=(
            FinishReason.CONTEXT_LENGTH if is_cut_short else FinishReason.TOKEN_COUNT_MAX
        ),
        end_token_ids=frozenset() if request.ignore_end_of_sequence else bounds.end_token_ids,
        stop_strings=tuple(request.stop_strings),
    )


def _check_strings(request: worker_pb2.GenerateRequest) -> None:
    count = len(request.stop_strings)
    if count > STOP_STRINGS_MAX:
        raise field_invalid(
            "stop_strings",
            f"{count} stop strings, but at most {STOP_STRINGS_MAX} are taken",
            numbers={"stop_string_count": count, "stop_strings_max": STOP_STRINGS_MAX},
        )
    for index, stop in enumerate(request.stop_strings):
        if not 1 <= len(stop) <= STOP_STRING_LENGTH_MAX:
            raise field_invalid(
                f"stop_strings[{index}]",
                f"a stop string of {len(stop)} characters, but 1 to {STOP_STRING_LENGTH_MAX}"
                " are taken",
                numbers={"length": len(stop), "length_max": STOP_STRING_LENGTH_MAX},
            )
    if len(request.cache_salt) > CACHE_SALT_LENGTH_MAX:
        raise field_invalid(
            "cache_salt",
            f"a cache salt of {len(request.cache_salt)} characters, but at most"
            f" {CACHE_SALT_LENGTH_MAX} are taken",
            numbers={"length": len(request.cache_salt), "length_max": CACHE_SALT_LENGTH_MAX},
        )


def _check_range(name: str, value: int, *, low: int, high: int) -> None:
    if not low <= value <= high:
        raise field_invalid(
            name,
            f"{name} is {value}, but must be {low} to {high}",
            numbers={name: value, f"{name}_limit": high},
        )


def _as_written(value: float) -> float:
    """A float field as it was meant: 0.9 arrives as 0.89999998."""
    return float(f"{value:.7g}") if math.isfinite(value) else value
