"""Commands that run the servers."""

import os
import queue
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from prefixd.clients.cli import output
from prefixd.clients.cli.options import CONTROLLER, WORKER, AsJson
from prefixd.clients.processes import (
    ProcessEnded,
    Servers,
    ServersConfig,
    check_worker_installed,
    servers,
)

PASS_SOME_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that hands what it does not know to another program."""
PASS_ALL_ON = {**PASS_SOME_ON, "help_option_names": []}
"""Context settings of a command that hands all its arguments to another program."""


def controller(context: typer.Context) -> None:
    """Run a controller: same as `python -m prefixd.controller`.

    Example: prefixd controller --listen 127.0.0.1:7600 (all options: prefixd controller --help)
    """
    _become("prefixd.controller", context.args)


def worker(context: typer.Context) -> None:
    """Run a worker: same as `python -m prefixd.worker`.

    Example: prefixd worker --controller 127.0.0.1:7600 (all options: prefixd worker --help)
    """
    check_worker_installed()
    _become("prefixd.worker", context.args)


def up(
    context: typer.Context,
    controller_listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where the controller listens.")
    ] = CONTROLLER,
    worker_listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where the worker listens.")
    ] = WORKER,
    as_json: AsJson = False,
) -> None:
    """Run a controller and a worker with a small model until Ctrl-C.

    Further options go to the worker as they are (see prefixd worker --help).

    Examples: prefixd up; prefixd up --model ./my-model --block-count 4096
    """
    check_worker_installed()
    config = ServersConfig(
        controller_listen=controller_listen,
        worker_listen=worker_listen,
        worker_arguments=tuple(context.args),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    report: Callable[[str], None] = _no_report if as_json else _report
    try:
        with servers(config, report=report) as running:
            _print_ready(running, as_json=as_json)
            _wait_for_end(running)
    except KeyboardInterrupt:
        # Ctrl-C and SIGTERM are how this command ends; both servers have been stopped.
        if not as_json:
            typer.echo("stopped")
    except ProcessEnded as error:
        for line in error.log_lines:
            typer.echo(f"  {error.name}: {line}", err=True)
        raise


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process, so that signals and the exit code are the server's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _print_ready(running: Servers, *, as_json: bool) -> None:
    if as_json:
        output.print_json_line(
            {
                "controller_address": running.controller_connection.address,
                "worker_address": running.worker_connection.address,
                "controller_pid": running.controller.pid,
                "worker_pid": running.worker.pid,
            }
        )
        return
    typer.echo(f"controller  {running.controller_connection.address}")
    typer.echo(f"worker      {running.worker_connection.address}")
    typer.echo(
        "ready: try `prefixd chat` or `prefixd pools` in another terminal; Ctrl-C stops both"
    )


def _wait_for_end(running: Servers) -> None:
    """Waits until a server ends by itself, which is an error; a signal interrupts the wait."""
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    for process in running.processes:
        process.call_at_end(lambda: ended.put(None))
    ended.get()
    for process in running.processes:
        process.check_running()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _report(text: str) -> None:
    typer.echo(f"{text} ...")


def _no_report(text: str) -> None:
    """Says nothing: the output is for a program."""
