"""The command line's one entry: commands by name, and errors as one line with an exit code."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import typer

from prefixd.clients.cli import answer, events, inspect, options, relay, serve
from prefixd.clients.cli.output import print_error
from prefixd.clients.errors import (
    AddressInvalid,
    DeadlinePassed,
    PrefixdError,
    RequestInvalid,
    ServerUnreachable,
)
from prefixd.clients.processes import ProcessEnded

EXIT_FAILED = 1
"""A server refused, or something failed."""
EXIT_USAGE = 2
"""The command line is wrong."""
EXIT_UNREACHABLE = 3
"""No server answers."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""

PANELS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Answers": (answer.generate, answer.chat, answer.reload),
    "Pools": (
        inspect.info,
        inspect.pools,
        inspect.sequences,
        inspect.sequence,
        inspect.blocks,
        inspect.block,
        inspect.free,
        inspect.flush,
        events.evict,
        events.verify,
        events.watch,
        relay.relay,
    ),
}
"""Client commands in the order of the help, by the panel that they stand in."""


def build() -> typer.Typer:
    """Makes the application with all its commands."""
    app = typer.Typer(
        name="prefixd",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(options.root)
    app.command(context_settings=serve.PASS_SOME_ON, rich_help_panel="Servers")(serve.up)
    for command in (serve.controller, serve.worker):
        app.command(
            context_settings=serve.PASS_ALL_ON, add_help_option=False, rich_help_panel="Servers"
        )(command)
    for panel, commands in PANELS.items():
        for one in commands:
            app.command(rich_help_panel=panel)(one)
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; every error is one line on standard error."""
    try:
        result = build()(args=list(arguments), prog_name="prefixd", standalone_mode=False)
        sys.stdout.flush()
    except (AddressInvalid, RequestInvalid) as error:
        print_error(error.message)
        return EXIT_USAGE
    except (ServerUnreachable, DeadlinePassed) as error:
        print_error(error.message)
        return EXIT_UNREACHABLE
    except ProcessEnded as error:
        print_error(error.message)
        return EXIT_USAGE if error.exit_code == EXIT_USAGE else EXIT_FAILED
    except PrefixdError as error:
        print_error(f"{error.reason}: {error.message}" if error.reason else error.message)
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`prefixd blocks | head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print_error(str(error))
        return EXIT_FAILED
    except UnicodeError as error:
        print_error(f"the input is not UTF-8 text: {error}")
        return EXIT_USAGE
    except usage_error() as error:
        message = _message(error)
        # Without any argument typer has printed the help itself, and has no message.
        if message:
            print_error(f"{message.rstrip('.')} (see {_command_path(error)} --help)")
        return EXIT_USAGE
    return result if isinstance(result, int) else 0


def usage_error() -> type[Exception]:
    """The base of what typer raises for a wrong command line; typer itself does not export it."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _message(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    message = format_message() if callable(format_message) else str(error)
    # Typer's and pydantic's words for what ours say better.
    return message.removeprefix("Invalid value: ").replace(": Value error, ", ": ")


def _command_path(error: Exception) -> str:
    """The command whose help explains the error, as one would type it."""
    return getattr(getattr(error, "ctx", None), "command_path", "prefixd")


def main() -> None:
    """Runs the command line of this process."""
    if sys.stdin is None or sys.stdout is None:
        # The next file that is opened would get the closed one's number.
        print_error("standard input and output must be open")
        sys.exit(EXIT_FAILED)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
