"""The command that publishes a pool's events to vLLM's consumers."""

import asyncio
from typing import Annotated

import typer

from prefixd.clients.cli import output
from prefixd.clients.cli.options import (
    CONTROLLER,
    AsJson,
    ControllerAddress,
    PoolName,
    pool_name_of,
    settings_of,
)
from prefixd.clients.connection import Connection
from prefixd.clients.errors import PrefixdError

BATCHES_KEPT_MAX = 10_000
"""Batches that can be replayed."""


def relay(  # noqa: PLR0917 - typer fills in options by name
    context: typer.Context,
    pool_name: PoolName = None,
    endpoint: Annotated[
        str, typer.Option("--publish", metavar="ENDPOINT", help="Where to publish, over ZeroMQ.")
    ] = "tcp://127.0.0.1:5557",
    replay_endpoint: Annotated[
        str | None,
        typer.Option("--replay", metavar="ENDPOINT", help="Where past batches can be asked for."),
    ] = None,
    topic: Annotated[
        str, typer.Option(help="Topic of every batch, for instance kv@POD@MODEL.")
    ] = "",
    has_bytes_hashes: Annotated[
        bool, typer.Option("--bytes-hashes", help="Whole digests instead of 64-bit integers.")
    ] = False,
    data_parallel_rank: Annotated[
        int, typer.Option(min=0, help="Rank that the batches carry.")
    ] = 0,
    batches_kept_max: Annotated[
        int, typer.Option("--keep", min=0, help="Batches that can be replayed.")
    ] = BATCHES_KEPT_MAX,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Publish a pool's events as vLLM does, for routers that follow KV caches.

    Needs the extra `events` of the package. Runs until SIGTERM or Ctrl-C.
    Example: prefixd relay --replay tcp://127.0.0.1:5558 --topic kv@pod-1@smollm2
    """
    try:
        from prefixd.clients.relay.process import relay_pool
        from prefixd.clients.relay.publisher import Publication, Publisher
        from prefixd.clients.relay.vllm_events import HashForm
    except ImportError as error:
        raise PrefixdError(
            f"{error.name} is missing; install it with: pip install '.[events]' (in a checkout)"
        ) from error
    settings = settings_of(context)
    with settings.controller(controller) as client:
        name = client.pool(pool_name_of(client, pool_name)).pool_name

    def announce(publisher: Publisher) -> None:
        _announce(name, publisher.endpoint, publisher.replay_endpoint, as_json=as_json)

    publication = Publication(
        endpoint, replay_endpoint, topic, data_parallel_rank, batches_kept_max
    )
    asyncio.run(
        relay_pool(
            Connection(controller, timeout_s=settings.timeout_s, tls=settings.tls),
            publication,
            pool_name=name,
            form=HashForm.BYTES if has_bytes_hashes else HashForm.INT,
            on_started=announce,
        )
    )


def _announce(pool_name: str, endpoint: str, replay_endpoint: str | None, *, as_json: bool) -> None:
    if as_json:
        output.print_json_line(
            {"pool_name": pool_name, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
        )
        return
    replay = "" if replay_endpoint is None else f", replay on {replay_endpoint}"
    output.print_line(f"publishing the events of {pool_name} on {endpoint}{replay}")
