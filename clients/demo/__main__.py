"""`python -m prefixd.clients.demo`: one long document, three questions, two processes."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from prefixd.clients.answers import GenerateOptions, WorkerInfo
from prefixd.clients.cli.output import block_table, print_error
from prefixd.clients.controller_client import ControllerClient
from prefixd.clients.demo import grpcurl, report, scenario
from prefixd.clients.demo.scenario import Asked
from prefixd.clients.errors import PrefixdError
from prefixd.clients.processes import (
    ProcessEnded,
    Servers,
    ServersConfig,
    check_worker_installed,
    servers,
)
from prefixd.clients.worker_client import WorkerClient

GPU_DEVICE_FILE = Path("/dev/nvidiactl")
"""Stands where a GPU's driver is loaded; the clients have no torch to ask."""
BITWISE_BACKEND = "strict"
"""The attention backend whose answers do not depend on what was cached."""
LIVE_SEQUENCE_ID = "demo-live"
"""Name of the sequence whose block table is shown."""
WIDTH = 110
"""Columns where standard output is no terminal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a demo came to: the answers in order, and whether they agree as they must."""

    asked: tuple[Asked, ...]
    block_size: int
    is_right: bool


def run(console: Console, config: ServersConfig) -> Outcome:
    """Runs the whole demo: starts both processes, asks, compares, and stops both."""
    report.introduce(console)
    with (
        servers(config, report=lambda text: console.print(f"[dim]{text} ...[/]")) as running,
        WorkerClient(running.worker_connection) as worker,
        ControllerClient(running.controller_connection) as controller,
    ):
        info = worker.worker_info()
        report.servers(console, running, info)
        scenario.warm_up(worker)
        asked = _ask_all(console, worker)
        report.explain(console, asked, block_size=info.block_size)
        _show_live_sequence(console, running, worker, controller)
        is_right = _compare(console, worker, asked, info)
    console.print("\nBoth processes have been stopped.")
    return Outcome(tuple(asked), info.block_size, is_right)


def _ask_all(console: Console, worker: WorkerClient) -> list[Asked]:
    asked: list[Asked] = []
    for question in scenario.QUESTIONS:
        with console.status(f"asking: {question}"):
            asked.append(scenario.ask(worker, question))
        report.question_line(console, asked[-1])
    report.answers(console, asked)
    return asked


def _show_live_sequence(
    console: Console, running: Servers, worker: WorkerClient, controller: ControllerClient
) -> None:
    """Looks at a sequence's block table while its answer is generated, then cancels the answer."""
    pool = controller.pool(worker.worker_info().pool_name)
    command = grpcurl.sequence_command(
        address=running.controller_connection.address,
        pool_name=pool.pool_name,
        sequence_id=LIVE_SEQUENCE_ID,
    )
    options = GenerateOptions(
        sequence_id=LIVE_SEQUENCE_ID,
        token_count_max=scenario.LIVE_TOKEN_COUNT_MAX,
        ignore_end_of_sequence=True,
    )
    with worker.stream(scenario.prompt(scenario.QUESTIONS[0]), options) as stream:
        stream.started()
        found = controller.sequence(pool_name=pool.pool_name, sequence_id=LIVE_SEQUENCE_ID)
        program = grpcurl.find_grpcurl()
        printed = None if program is None else command.run(program)
    report.live_sequence(console, found, command.shown)
    console.print(block_table(found.tables[0], group_index=0, block_size=pool.block_size))
    if printed is None:
        console.print("[dim]grpcurl is not installed here, so the command was not run.[/]")
    else:
        report.grpcurl_answer(console, grpcurl.block_ids_of(printed))


def _compare(console: Console, worker: WorkerClient, asked: list[Asked], info: WorkerInfo) -> bool:
    """Has every question answered the other way, and compares the answers token by token."""
    report.comparison_title(console)
    identical = True
    for one in asked:
        # The first question was computed as a whole; now the cache holds all of it.
        cached = one.answer.cached_token_count > 0
        other_way = scenario.ask_without_cache if cached else scenario.ask
        with console.status(f"asking the other way: {one.question}"):
            again = other_way(worker, one.question)
        report.comparison(console, one, again)
        identical = identical and one.answer.token_ids == again.answer.token_ids
    must_be_identical = info.attention_backend == BITWISE_BACKEND and info.device == "cpu"
    return report.verdict(console, identical=identical, must_be_identical=must_be_identical)


def servers_config(backend: str | None, *, device: str) -> ServersConfig:
    """How the demo starts its servers; `backend` None is bitwise where there is no GPU."""
    arguments = ["--pool-name", "demo", "--device", device]
    if backend is None and (device == "cpu" or not GPU_DEVICE_FILE.exists()):
        backend = BITWISE_BACKEND
    if backend is not None:
        arguments += ["--attention-backend", backend]
    return ServersConfig(worker_arguments=tuple(arguments))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(
    attention_backend: Annotated[
        str | None,
        typer.Option(help="The worker's attention backend; by default `strict` without a GPU."),
    ] = None,
    device: Annotated[str, typer.Option(help="The worker's device.")] = "auto",
) -> None:
    """Ask three questions about one long document and see what a prefix cache saves."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        check_worker_installed()
        outcome = run(console, servers_config(attention_backend, device=device))
    except KeyboardInterrupt:
        console.print("\nInterrupted; both processes have been stopped.")
        raise typer.Exit(130) from None
    except PrefixdError as error:
        if isinstance(error, ProcessEnded):
            for line in error.log_lines:
                typer.echo(f"  {error.name}: {line}", err=True)
        print_error(error.message)
        raise typer.Exit(1) from None
    if not outcome.is_right:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
