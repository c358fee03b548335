"""Commands that make a worker answer."""

import contextlib
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from prefixd.clients.answers import (
    Answer,
    BeamSearch,
    ChatPrompt,
    Continuation,
    Conversation,
    GenerateOptions,
    Message,
    Prompt,
    RetentionHint,
)
from prefixd.clients.cli import output
from prefixd.clients.cli.options import INT32_MAX, WORKER, AsJson, WorkerAddress, settings_of
from prefixd.clients.errors import CallRefused
from prefixd.clients.worker_client import AnswerStream, WorkerClient


class ContinuationName(StrEnum):
    """What `--continuation` can be."""

    EXPECTED = "expected"
    OVER = "over"


TokenCountMax = Annotated[
    int,
    typer.Option(
        "--token-count-max",
        "-n",
        min=0,
        max=INT32_MAX,
        help="Most tokens; 0: the server's default.",
    ),
]
Temperature = Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")]
TopK = Annotated[
    int, typer.Option(min=0, max=INT32_MAX, help="Choose among this many tokens; 0: all.")
]
TopP = Annotated[
    float | None, typer.Option(help="Choose among the likeliest tokens of this total probability.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Makes the choice repeatable.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this string; may be repeated.")
]
CacheSalt = Annotated[
    str, typer.Option(help="Share cached blocks only with answers of the same salt.")
]
LoraName = Annotated[
    str, typer.Option("--lora", metavar="NAME", help="Answer through this LoRA adapter.")
]
DraftTokenCountMax = Annotated[
    int, typer.Option(min=0, help="Guess so many tokens ahead by prompt lookup; 0: none.")
]
SampleCount = Annotated[int, typer.Option("--samples", min=1, help="Answers to the one prompt.")]
BeamCount = Annotated[
    int, typer.Option("--beams", min=0, help="Search with so many beams; 0: draw tokens.")
]
LengthPenalty = Annotated[float | None, typer.Option(help="Of the beams' scores; 1 if left out.")]
Continues = Annotated[
    ContinuationName | None,
    typer.Option("--continuation", help="Whether another turn will follow on this answer."),
]
Priority = Annotated[
    int, typer.Option(min=0, max=INT32_MAX, help="Keep the answer's blocks longer: 0 to 7.")
]
RetentionMs = Annotated[
    int, typer.Option(min=0, help="How long these two hold, in milliseconds; 0: until used.")
]
System = Annotated[str, typer.Option(help="System message.")]

NEXT_TURN = RetentionHint(Continuation.EXPECTED)
"""What is known of an answer in a conversation that is not over."""
TYPE_HERE = "> "
"""What stands where a person types a message."""


def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="The prompt; `-` or nothing reads standard input.")
    ] = "-",
    *,
    chat_template: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    system: System = "",
    token_count_max: TokenCountMax = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    cache_salt: CacheSalt = "",
    skip_cache_read: Annotated[
        bool, typer.Option("--skip-cache-read", help="Match nothing in the cache, yet publish.")
    ] = False,
    sequence_id: Annotated[str, typer.Option(help="Name of the sequence for inspection.")] = "",
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="Add the prompt's log probabilities to JSON.")
    ] = False,
    draft_token_count_max: DraftTokenCountMax = 0,
    lora_name: LoraName = "",
    sample_count: SampleCount = 1,
    beam_count: BeamCount = 0,
    length_penalty: LengthPenalty = None,
    continuation: Continues = None,
    priority: Priority = 0,
    retention_ms: RetentionMs = 0,
    worker: WorkerAddress = WORKER,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; the text streams to standard output, its cost to standard error.

    With --samples or --beams each answer is printed when all are complete.

    Examples: prefixd generate "Once upon a time" -n 40; prefixd generate --chat - < question.txt;
    prefixd generate "Once" --samples 4 --temperature 0.8; prefixd generate "Once" --beams 4
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    options = GenerateOptions(
        token_count_max=token_count_max,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_strings=tuple(stop or ()),
        cache_salt=cache_salt,
        skip_cache_read=skip_cache_read,
        sequence_id=sequence_id,
        prompt_logprobs=prompt_logprobs,
        draft_token_count_max=draft_token_count_max,
        lora_name=lora_name,
        sample_count=sample_count,
        beam_search=_beam_search(beam_count, length_penalty),
        retention_hint=_retention_hint(continuation, priority=priority, duration_ms=retention_ms),
    )
    asked: Prompt = _chat_prompt(text, system=system) if chat_template or system else text
    with settings_of(context).worker(worker) as client, client.stream(asked, options) as stream:
        if as_json:
            answers = stream.answers()
            output.print_json(answers[0] if sample_count == 1 else answers)
        elif sample_count > 1:
            _print_answers(stream.answers())
        else:
            _print_cost(output.answer_summary(_print_stream(stream)))


def _beam_search(beam_count: int, length_penalty: float | None) -> BeamSearch | None:
    if length_penalty is not None and not beam_count:
        raise typer.BadParameter("--length-penalty is of a beam search: give --beams too")
    return BeamSearch(beam_count, length_penalty) if beam_count else None


def _retention_hint(
    name: ContinuationName | None, *, priority: int, duration_ms: int
) -> RetentionHint | None:
    if name is None and not priority and not duration_ms:
        return None
    continuation = Continuation.UNKNOWN if name is None else Continuation(name.value)
    return RetentionHint(continuation, priority, duration_ms)


def _chat_prompt(text: str, *, system: str) -> ChatPrompt:
    messages = (Message("system", system),) if system else ()
    return ChatPrompt((*messages, Message("user", text)))


def chat(
    context: typer.Context,
    *,
    system: System = "",
    token_count_max: TokenCountMax = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    cache_salt: CacheSalt = "",
    draft_token_count_max: DraftTokenCountMax = 0,
    lora_name: LoraName = "",
    worker: WorkerAddress = WORKER,
    as_json: AsJson = False,
) -> None:
    """Hold a conversation; each line is a message, and the end of input ends it.

    Answers keep their token ids, so every turn finds all turns before it in the cache. With --json
    each answer is one line of JSON.

    Examples: prefixd chat --system "Be brief."; printf 'Hello\\nAnd you?\\n' | prefixd chat --json
    """
    options = GenerateOptions(
        token_count_max=token_count_max,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_strings=tuple(stop or ()),
        cache_salt=cache_salt,
        draft_token_count_max=draft_token_count_max,
        lora_name=lora_name,
        retention_hint=NEXT_TURN,
    )
    conversation = Conversation(system=system)
    with settings_of(context).worker(worker) as client:
        # A dead server is told before anybody has typed a line.
        client.worker_info()
        if sys.stdin.isatty():
            _talk(client, conversation, options)
            return
        for content in (line.strip() for line in sys.stdin):
            if content:
                _turn(client, conversation, content, options, as_json=as_json)


def reload(
    context: typer.Context,
    model_version: Annotated[str, typer.Argument(help="Version of the weights to read.")],
    *,
    folder: Annotated[
        str, typer.Option(help="Folder on the worker's machine; the one of last time if left out.")
    ] = "",
    worker: WorkerAddress = WORKER,
    as_json: AsJson = False,
) -> None:
    """Make a worker read its model's weights again; what the old ones cached is dropped.

    Example: prefixd reload 2026-11-29 --folder ./my-model
    """
    with settings_of(context).worker(worker) as client:
        reloaded = client.reload_weights(model_version, folder=folder)
    if as_json:
        output.print_json(reloaded)
        return
    typer.echo(
        f"runs {model_version}; dropped {output.counted(reloaded.dropped_block_count, 'block')} of"
        f" {reloaded.previous_model_version or 'the default version'}"
    )


def _talk(client: WorkerClient, conversation: Conversation, options: GenerateOptions) -> None:
    """Holds a conversation with a person: a refusal or Ctrl-C ends the turn, not the talk."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives input() editing and history
    while True:
        try:
            content = input(TYPE_HERE).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            # The shell's prompt begins on a line of its own.
            print()
            raise
        if not content:
            continue
        try:
            _turn(client, conversation, content, options, as_json=False)
        except CallRefused as error:
            output.print_error(f"{error.reason}: {error.message}")
        except KeyboardInterrupt:
            print(" (stopped)")


def _turn(
    client: WorkerClient,
    conversation: Conversation,
    content: str,
    options: GenerateOptions,
    *,
    as_json: bool,
) -> None:
    """Answers one message and adds both to the conversation."""
    with client.stream(conversation.prompt(content), options) as stream:
        if as_json:
            answer = stream.answer()
            output.print_json_line(answer)
        else:
            answer = _print_stream(stream)
            _print_cost(output.answer_summary(answer))
    conversation.add_turn(content, answer)


def _print_stream(stream: AnswerStream) -> Answer:
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print(flush=True)
    return stream.answer()


def _print_answers(answers: Sequence[Answer]) -> None:
    for answer in answers:
        score = "" if answer.score is None else f" (score {answer.score:.4f})"
        print(f"[{answer.sample_index}]{score} {answer.text}", flush=True)
    _print_cost(output.samples_summary(answers))


def _print_cost(summary: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(summary, style="dim")
