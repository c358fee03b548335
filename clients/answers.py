"""Prompts, options and answers of a worker: frozen values without protobuf."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from prefixd.clients.results import LoraAdapter


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `token_ids` are those that a model generated for the content. Where they are set they stand in
    the prompt in place of the content's own tokenization, so an earlier answer hits the cache.
    """

    role: str
    content: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, oldest first, that the worker renders with the model's chat template."""

    messages: tuple[Message, ...]


Prompt: TypeAlias = str | ChatPrompt | TokenPrompt
"""Plain text, chat messages or token ids."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """How to search with beams. `length_penalty` None is 1."""

    beam_count: int
    length_penalty: float | None = None


class Continuation(StrEnum):
    """Whether a conversation goes on behind an answer."""

    UNKNOWN = "unknown"
    EXPECTED = "expected"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RetentionHint:
    """What a client knows about later use of an answer's blocks, its prompt's included.

    `priority` is 0 to 7, higher stays longer; `duration_ms` is how long the hint holds from the
    answer's end on, 0 until the blocks are used again.
    """

    continuation: Continuation = Continuation.UNKNOWN
    priority: int = 0
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to answer. The defaults are greedy and the server's own length limit.

    `token_count_max` 0 is the server's default. `top_p` None is 1; `seed` None is random.
    `sequence_id` names the sequence for inspection; empty lets the worker make a name.
    `prompt_logprobs` asks for the log probabilities of the prompt's tokens, which keeps the cache
    from being read. `draft_token_count_max` lets prompt lookup guess so many tokens ahead.
    `sample_count` above 1 asks for several answers, drawn with the seeds from `seed` on, or for so
    many hypotheses of `beam_search`, the best first. `retention_hint` is heeded where the pool's
    eviction policy does.
    """

    token_count_max: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    ignore_end_of_sequence: bool = False
    cache_salt: str = ""
    skip_cache_read: bool = False
    sequence_id: str = ""
    prompt_logprobs: bool = False
    draft_token_count_max: int = 0
    lora_name: str = ""
    sample_count: int = 1
    beam_search: BeamSearch | None = None
    retention_hint: RetentionHint | None = None


class FinishReason(StrEnum):
    """Why an answer ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_STRING = "stop_string"
    TOKEN_COUNT_MAX = "token_count_max"
    CONTEXT_LENGTH = "context_length"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence runs."""

    sequence_id: str
    prompt_token_count: int
    cached_token_count: int
    prompt_token_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """More of an answer: whole characters, and the tokens behind them."""

    text: str
    token_ids: tuple[int, ...]
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    `stop_string` is the one that appeared; empty: none. `score` is that of a beam search's
    hypothesis. `prompt_logprobs` are natural logarithms, from the prompt's second token on; None
    where they were not asked for.
    """

    sequence_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    block_count: int
    time_to_first_token_ms: float
    decode_tokens_per_second: float
    preemption_count: int
    draft_token_count: int
    accepted_draft_token_count: int
    sample_index: int
    score: float | None
    prompt_logprobs: tuple[float, ...] | None

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation that goes on."""
        # The tokens of a stop string stand in `token_ids` but not in `text`: they were cut off the
        # answer, so the next turn must not see them.
        token_ids = () if self.stop_string else self.token_ids
        return Message("assistant", self.text, token_ids)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A prompt's tokens."""

    token_count: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker and its pool; `epoch` is 0 while it is not registered."""

    version: str
    model_name: str
    model_version: str
    pool_name: str
    controller_address: str
    epoch: int
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
    running_sequence_count: int
    waiting_sequence_count: int
    prefill_token_count: int
    decode_token_count: int
    preemption_count: int
    chunk_token_count_max: int
    lora_adapters: tuple[LoraAdapter, ...]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A worker runs other weights; `dropped_block_count` cached blocks went with the old ones."""

    previous_model_version: str
    dropped_block_count: int


class Conversation:
    """Messages of a chat, kept with the token ids that the model generated.

    Messages come in turns: a user's message is added together with its answer, so a turn that
    failed leaves the conversation as it was.
    """

    def __init__(self, *, system: str = "") -> None:
        self._messages: tuple[Message, ...] = (Message("system", system),) if system else ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, oldest first."""
        return self._messages

    def prompt(self, content: str) -> ChatPrompt:
        """The prompt of the user's next message; the conversation stays as it is."""
        return ChatPrompt((*self._messages, Message("user", content)))

    def add_turn(self, content: str, answer: Answer) -> None:
        """Adds the user's message and its answer."""
        self._messages = (*self._messages, Message("user", content), answer.message)
