"""Commands that make a worker answer."""

import contextlib
import sys
from typing import Annotated

import typer
from rich.console import Console

from prefixd.clients.answers import Answer, ChatPrompt, Conversation, GenerateOptions, Message
from prefixd.clients.cli import output
from prefixd.clients.cli.options import INT32_MAX, WORKER, AsJson, WorkerAddress, settings_of
from prefixd.clients.errors import CallRefused
from prefixd.clients.worker_client import AnswerStream, WorkerClient

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
System = Annotated[str, typer.Option(help="System message.")]

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
    worker: WorkerAddress = WORKER,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; the text streams to standard output, its cost to standard error.

    Examples: prefixd generate "Once upon a time" -n 40; prefixd generate --chat - < question.txt
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
    )
    messages = (Message("system", system),) if system else ()
    with settings_of(context).worker(worker) as client:
        if chat_template or system:
            stream = client.stream(ChatPrompt((*messages, Message("user", text))), options)
        else:
            stream = client.stream(text, options)
        with stream:
            if as_json:
                output.print_json(stream.answer())
                return
            _print_summary(_print_stream(stream))


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
            _print_summary(answer)
    conversation.add_turn(content, answer)


def _print_stream(stream: AnswerStream) -> Answer:
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print(flush=True)
    return stream.answer()


def _print_summary(answer: Answer) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        output.answer_summary(answer), style="dim"
    )
