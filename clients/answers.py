"""Prompts, options and answers of a worker: frozen values without protobuf."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


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
class GenerateOptions:
    """How to answer. The defaults are greedy and the server's own length limit.

    `token_count_max` 0 is the server's default. `top_p` None is 1; `seed` None is random.
    `sequence_id` names the sequence for inspection; empty lets the worker make a name.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `stop_string` is the one that appeared; empty: none."""

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
