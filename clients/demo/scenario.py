"""The demo's prompts, how they are asked."""

from dataclasses import dataclass
from importlib import resources

from prefixd.clients.answers import Answer, ChatPrompt, GenerateOptions, Message
from prefixd.clients.worker_client import WorkerClient

QUESTIONS = (
    "What note is the bell tuned to?",
    "What type of battery does the machine use?",
    "What is the telephone number of the service office?",
)
"""What a reader of the manual might ask."""
ANSWER_TOKEN_COUNT_MAX = 40
"""Most tokens of an answer."""
LIVE_TOKEN_COUNT_MAX = 400
"""Most tokens of the sequence that is looked at while it runs; it is cancelled afterwards."""
WARM_UP_SALT = "warm-up"
"""Keeps the warm-up's blocks away from the questions."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, the tokens of its prompt, and its answer."""

    question: str
    prompt_token_ids: tuple[int, ...]
    answer: Answer


def manual() -> str:
    """The document that the questions are about: a manual of a machine that does not exist."""
    return resources.files(__package__).joinpath("manual.md").read_text(encoding="utf-8")


def prompt(question: str) -> ChatPrompt:
    """The whole manual with a question behind it, so equal beginnings can be shared."""
    content = f"{manual()}\n\nQuestion: {question}\nAnswer in one short sentence."
    return ChatPrompt((Message("user", content),))


def warm_up(worker: WorkerClient) -> None:
    """Runs one forward pass that shares nothing with the questions: first ones are slow."""
    options = GenerateOptions(token_count_max=2, cache_salt=WARM_UP_SALT)
    worker.generate("The quick brown fox jumps over the lazy dog.", options)


def ask(worker: WorkerClient, question: str) -> Asked:
    """Asks greedily, with whatever the cache holds."""
    return _ask(worker, question, GenerateOptions(token_count_max=ANSWER_TOKEN_COUNT_MAX))


def ask_without_cache(worker: WorkerClient, question: str) -> Asked:
    """Asks greedily and has everything computed anew."""
    options = GenerateOptions(token_count_max=ANSWER_TOKEN_COUNT_MAX, skip_cache_read=True)
    return _ask(worker, question, options)


def _ask(worker: WorkerClient, question: str, options: GenerateOptions) -> Asked:
    with worker.stream(prompt(question), options) as stream:
        started = stream.started()
        return Asked(question, started.prompt_token_ids, stream.answer())
