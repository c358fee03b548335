"""Options that several commands share, and what the root command hands to all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixd.clients.connection import (
    CONTROLLER_ADDRESS_DEFAULT,
    TIMEOUT_S_DEFAULT,
    WORKER_ADDRESS_DEFAULT,
    Connection,
    Tls,
)
from prefixd.clients.controller_client import ControllerClient
from prefixd.clients.errors import PrefixdError
from prefixd.clients.worker_client import WorkerClient

ControllerAddress = Annotated[
    str,
    typer.Option(
        "--controller",
        envvar="PREFIXD_CONTROLLER",
        metavar="ADDRESS",
        help="Address of the controller: host:port or unix:/path.",
    ),
]
WorkerAddress = Annotated[
    str,
    typer.Option(
        "--worker",
        envvar="PREFIXD_WORKER",
        metavar="ADDRESS",
        help="Address of the worker: host:port or unix:/path.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PoolName = Annotated[
    str | None,
    typer.Option(
        "--pool",
        "-p",
        envvar="PREFIXD_POOL",
        metavar="NAME",
        help="Name of the pool; may be left out if there is only one.",
    ),
]

TIMEOUT_S_MAX = 86_400
"""Longest deadline of a call."""
INT32_MAX = 2**31 - 1
"""Largest count or block id that travels."""
CONTROLLER = CONTROLLER_ADDRESS_DEFAULT
"""Default of ControllerAddress."""
WORKER = WORKER_ADDRESS_DEFAULT
"""Default of WorkerAddress."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the root command."""

    timeout_s: float = TIMEOUT_S_DEFAULT
    tls: Tls | None = None

    def controller(self, address: str) -> ControllerClient:
        """A client of the controller at `address`."""
        return ControllerClient(Connection(address, timeout_s=self.timeout_s, tls=self.tls))

    def worker(self, address: str) -> WorkerClient:
        """A client of the worker at `address`."""
        return WorkerClient(Connection(address, timeout_s=self.timeout_s, tls=self.tls))


def settings_of(context: typer.Context) -> Settings:
    """What the root command was told."""
    settings = context.obj
    assert isinstance(settings, Settings)
    return settings


def pool_name_of(client: ControllerClient, pool_name: str | None) -> str:
    """The pool that was named, or the only one that there is."""
    if pool_name is not None:
        return pool_name
    names = [pool.pool_name for pool in client.pools()]
    if len(names) == 1:
        return names[0]
    if not names:
        raise PrefixdError("the controller has no pool")
    raise PrefixdError(f"name one of the {len(names)} pools with --pool: {', '.join(names)}")


def root(
    context: typer.Context,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.001, max=TIMEOUT_S_MAX, help="Deadline of each call, in seconds."
        ),
    ] = TIMEOUT_S_DEFAULT,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS with the system's certificate authorities.")
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM file of the authorities to trust."),
    ] = None,
    certificate_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM file of your own certificate."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM file of your own private key."),
    ] = None,
) -> None:
    """A prefix cache for LLM inference, shared over gRPC.

    Addresses come from an option, from PREFIXD_CONTROLLER and PREFIXD_WORKER, or are the defaults.
    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no server answers.
    """
    if (certificate_file is None) != (key_file is None):
        raise typer.BadParameter("--certificate-file and --key-file go together")
    trust = Tls(ca_file=ca_file, certificate_file=certificate_file, key_file=key_file)
    context.obj = Settings(timeout_s=timeout_s, tls=trust if tls or trust != Tls() else None)
