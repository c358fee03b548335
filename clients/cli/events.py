"""Commands about what is cached: following its changes, evicting and verifying."""

import dataclasses
from typing import Annotated

import typer

from prefixd.clients.cli import output
from prefixd.clients.cli.options import (
    CONTROLLER,
    INT32_MAX,
    AsJson,
    ControllerAddress,
    PoolName,
    pool_name_of,
    settings_of,
)
from prefixd.clients.events import KINDS, Event, Removed, Stored, Watched

HASH_DIGITS = 16
"""Hexadecimal digits of a digest that people see."""


def evict(
    context: typer.Context,
    block_ids: Annotated[
        list[int] | None,
        typer.Argument(metavar="BLOCK", max=INT32_MAX, help="Ids of blocks."),
    ] = None,
    hashes_hex: Annotated[
        list[str] | None,
        typer.Option("--hash", metavar="HEX", help="Whole digest of a block; may be given again."),
    ] = None,
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Take blocks out of the cache, with everything that is cached behind them.

    A block that a sequence holds stays in its table and is forgotten when it is given back.
    Examples: prefixd evict 17 18; prefixd evict --hash $(prefixd block 17 --json | jq -r
    .block.hash_hex)
    """
    if not block_ids and not hashes_hex:
        raise typer.BadParameter("name blocks by id or with --hash")
    with settings_of(context).controller(controller) as client:
        found = client.evict_blocks(
            pool_name_of(client, pool_name), block_ids=block_ids or (), hashes_hex=hashes_hex or ()
        )
    if as_json:
        output.print_json(found)
    else:
        typer.echo(
            f"dropped {output.counted(found.dropped_block_count, 'cached block')},"
            f" {found.held_block_count:,} of them still held"
        )


def verify(
    context: typer.Context,
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Check every invariant of a pool; one that is broken ends the pool's epoch.

    The controller does nothing else meanwhile. Example: prefixd verify --pool smollm2
    """
    with settings_of(context).controller(controller) as client:
        found = client.verify_pool(pool_name_of(client, pool_name))
    if as_json:
        output.print_json(found)
        return
    for invariant in found.invariants:
        typer.echo(f"ok: {invariant}")
    typer.echo(
        f"checked {found.block_count:,} blocks, {found.cached_block_count:,} of them cached,"
        f" {found.digest_count:,} digests, {found.sequence_count:,} sequences"
    )


def watch(
    context: typer.Context,
    pool_name: PoolName = None,
    after_revision: Annotated[
        int | None,
        typer.Option(min=0, help="Begin behind this revision; without it, with what comes now."),
    ] = None,
    with_token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Show the tokens of stored blocks too.")
    ] = False,
    event_count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after so many events.")
    ] = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Follow what is published and what is no longer, one line per event, until interrupted.

    Examples: prefixd watch; prefixd watch --after-revision 0 --json | jq .event
    """
    with settings_of(context).controller(controller) as client:
        watched = Watched(
            pool_name_of(client, pool_name),
            after_revision=after_revision,
            with_token_ids=with_token_ids,
        )
        left_count = event_count
        with client.watch_events(watched) as batches:
            for batch in batches:
                for event in batch.events[:left_count]:
                    _print(event, epoch=batch.epoch, as_json=as_json)
                if left_count is not None:
                    left_count -= min(left_count, len(batch.events))
                    if left_count == 0:
                        return


def _print(event: Event, *, epoch: int, as_json: bool) -> None:
    kind = KINDS[type(event)]
    if as_json:
        names = [field.name for field in dataclasses.fields(event)]
        values = {name: getattr(event, name) for name in names}
        output.print_json_line({"event": kind, "epoch": epoch} | values)
        return
    output.print_line(f"{event.revision:>8}  {kind:<8}{_summary(event)}")


def _summary(event: Event) -> str:
    match event:
        case Stored():
            parent = event.parent_hash_hex[:HASH_DIGITS] or "the root"
            shown = f" {_hashes(event.hashes_hex)} behind {parent}"
            return shown if event.token_ids is None else f"{shown}, tokens {list(event.token_ids)}"
        case Removed():
            return f" {_hashes(event.hashes_hex)}"
        case _:
            return ""


def _hashes(hashes_hex: tuple[str, ...]) -> str:
    first = hashes_hex[0][:HASH_DIGITS]
    return first if len(hashes_hex) == 1 else f"{first} and {len(hashes_hex) - 1:,} more"
