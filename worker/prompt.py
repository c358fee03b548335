"""Turns prompts into token ids: text, conversations, or token ids as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixd.worker.errors import WorkerError, field_invalid

PLACEHOLDER_PREFIX = "prefixd0message"
"""Begins the words that stand for given tokens while a chat template is rendered."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        token_ids: where not empty, they stand in the prompt in place of the content's own
            tokenization.
    """

    role: str
    content: str
    token_ids: tuple[int, ...] = ()


class PromptReader:
    """Tokenizes for one model."""

    def __init__(self, tokenizer: Any | None, *, vocabulary_size: int) -> None:
        """Makes a reader.

        Args:
            tokenizer: of transformers; None: only token ids can be read, and decode to no text.
            vocabulary_size: token ids must be below it.
        """
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model reads and writes text."""
        return self._tokenizer is not None

    def tokens(self, token_ids: Sequence[int], *, field: str) -> list[int]:
        """Checks given token ids; ``field`` names them in errors.

        Raises:
            WorkerError: PROMPT_EMPTY or TOKEN_ID_INVALID.
        """
        self._check_token_ids(token_ids, field=field)
        return _not_empty(list(token_ids))

    def text(self, text: str) -> list[int]:
        """Tokenizes plain text as it is, with the tokenizer's special tokens.

        Raises:
            WorkerError: PROMPT_EMPTY or UNSUPPORTED.
        """
        token_ids: list[int] = self._required_tokenizer()(text)["input_ids"]
        return _not_empty(token_ids)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Renders a conversation with the model's chat template, ready for the next answer.

        The template is rendered with a word in place of each message that brings its own tokens;
        then the tokens replace the word. What precedes the word is tokenized as it was when the
        message was generated behind it, so the earlier prompt and its answer come out token by
        token as they were.

        Raises:
            WorkerError: PROMPT_EMPTY, TOKEN_ID_INVALID, UNSUPPORTED, or FIELD_INVALID where the
                template does not take the messages.
        """
        if not messages:
            raise WorkerError("PROMPT_EMPTY", "the conversation has no message", field="prompt")
        tokenizer = self._required_tokenizer()
        if not tokenizer.chat_template:
            raise WorkerError(
                "UNSUPPORTED", "the model has no chat template; send text or token ids"
            )
        for index, message in enumerate(messages):
            field = f"prompt.chat.messages[{index}].token_ids"
            self._check_token_ids(message.token_ids, field=field)
        placeholders = _placeholders(messages)
        rendered = self._render(messages, placeholders)
        token_ids: list[int] = []
        for index, placeholder in placeholders.items():
            before, found, rendered = rendered.partition(placeholder)
            if not found or placeholder in rendered:
                raise field_invalid(
                    f"prompt.chat.messages[{index}].token_ids",
                    "the chat template does not show this message once; leave its token ids out",
                )
            token_ids += self._segment(before)
            token_ids += messages[index].token_ids
        token_ids += self._segment(rendered)
        return _not_empty(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones; none if there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _render(self, messages: Sequence[Message], placeholders: dict[int, str]) -> str:
        conversation = [
            {"role": message.role, "content": placeholders.get(index, message.content)}
            for index, message in enumerate(messages)
        ]
        try:
            rendered: str = self._required_tokenizer().apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise field_invalid(
                "prompt.chat.messages", f"the model's chat template refuses them: {error}"
            ) from error
        return rendered

    def _segment(self, text: str) -> list[int]:
        # The template wrote the special tokens itself.
        if not text:
            return []
        token_ids: list[int] = self._required_tokenizer()(text, add_special_tokens=False)[
            "input_ids"
        ]
        return token_ids

    def _required_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise WorkerError("UNSUPPORTED", "the model has no tokenizer; send token ids")
        return self._tokenizer

    def _check_token_ids(self, token_ids: Sequence[int], *, field: str) -> None:
        if token_ids and max(token_ids) >= self._vocabulary_size:
            index = next(i for i, t in enumerate(token_ids) if t >= self._vocabulary_size)
            raise WorkerError(
                "TOKEN_ID_INVALID",
                f"token id {token_ids[index]} is not below the vocabulary's"
                f" {self._vocabulary_size}",
                numbers={
                    "token_id": token_ids[index],
                    "index": index,
                    "vocabulary_size": self._vocabulary_size,
                },
                field=f"{field}[{index}]",
            )


def _placeholders(messages: Sequence[Message]) -> dict[int, str]:
    """A word for each message with tokens of its own; none is found in any message."""
    prefix = PLACEHOLDER_PREFIX
    while any(prefix in message.content or prefix in message.role for message in messages):
        prefix += "0"
    return {
        index: f"{prefix}x{index}x" for index, message in enumerate(messages) if message.token_ids
    }


def _not_empty(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise WorkerError("PROMPT_EMPTY", "the prompt holds no token", field="prompt")
    return token_ids
