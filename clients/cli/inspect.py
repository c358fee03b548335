"""Commands that look at a controller, and the one that empties a pool."""

from enum import StrEnum
from typing import Annotated

import typer

from prefixd.clients import results
from prefixd.clients.cli import output
from prefixd.clients.cli.options import (
    CONTROLLER,
    INT32_MAX,
    WORKER,
    AsJson,
    ControllerAddress,
    PoolName,
    WorkerAddress,
    pool_name_of,
    settings_of,
)


class Subject(StrEnum):
    """What `prefixd info` describes."""

    CONTROLLER = "controller"
    WORKER = "worker"


class State(StrEnum):
    """Block states that `prefixd blocks` can be narrowed to."""

    FREE = "free"
    EVICTABLE = "evictable"
    HELD = "held"


def info(
    context: typer.Context,
    subject: Annotated[Subject, typer.Argument(help="Which server.")] = Subject.CONTROLLER,
    controller: ControllerAddress = CONTROLLER,
    worker: WorkerAddress = WORKER,
    as_json: AsJson = False,
) -> None:
    """Describe the controller or the worker.

    Examples: prefixd info; prefixd info worker --json
    """
    found: object
    if subject is Subject.CONTROLLER:
        with settings_of(context).controller(controller) as controller_client:
            found = controller_client.server_info()
    else:
        with settings_of(context).worker(worker) as worker_client:
            found = worker_client.worker_info()
    if as_json:
        output.print_json(found)
    else:
        output.print_fields(found)


def pools(
    context: typer.Context, controller: ControllerAddress = CONTROLLER, as_json: AsJson = False
) -> None:
    """List the pools with their accounts.

    Examples: prefixd pools; prefixd pools --json | jq '.[].statistics'
    """
    with settings_of(context).controller(controller) as client:
        found = list(client.pools())
    if as_json:
        output.print_json(found)
    else:
        output.print_pools(found)


def sequences(
    context: typer.Context,
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """List a pool's open sequences.

    Example: prefixd sequences --pool smollm2
    """
    with settings_of(context).controller(controller) as client:
        found = list(client.sequences(pool_name_of(client, pool_name)))
    if as_json:
        output.print_json(found)
    else:
        output.print_sequences(found)


def sequence(
    context: typer.Context,
    sequence_id: Annotated[str, typer.Argument(metavar="SEQUENCE", help="Name of the sequence.")],
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Show an open sequence with its block tables.

    Example: prefixd sequence chat-7
    """
    with settings_of(context).controller(controller) as client:
        name = pool_name_of(client, pool_name)
        found = client.sequence(pool_name=name, sequence_id=sequence_id)
        if as_json:
            output.print_json(found)
            return
        block_size = client.pool(name).block_size
    output.print_sequence(found, block_size=block_size)


def blocks(
    context: typer.Context,
    pool_name: PoolName = None,
    state: Annotated[
        State | None, typer.Option(help="Only blocks in this state; all without it.")
    ] = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """List a pool's blocks by id.

    Examples: prefixd blocks; prefixd blocks --pool smollm2 --state evictable
    """
    wanted = None if state is None else results.BlockState(state.value)
    with settings_of(context).controller(controller) as client:
        found = list(client.blocks(pool_name_of(client, pool_name), state=wanted))
    if as_json:
        output.print_json(found)
    else:
        output.print_blocks(found)


def block(
    context: typer.Context,
    block_id: Annotated[
        int, typer.Argument(metavar="BLOCK", max=INT32_MAX, help="Id of the block.")
    ],
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Show one block and the sequences that hold it.

    Example: prefixd block 17
    """
    with settings_of(context).controller(controller) as client:
        found = client.block(pool_name=pool_name_of(client, pool_name), block_id=block_id)
    if as_json:
        output.print_json(found)
        return
    output.print_blocks([found.block])
    for sequence_id in found.sequence_ids:
        typer.echo(f"held by {sequence_id}")


def free(
    context: typer.Context,
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Show the order in which a pool's blocks would be handed out; 6..9 is short for 6 7 8 9.

    Example: prefixd free --pool smollm2
    """
    with settings_of(context).controller(controller) as client:
        found = client.free_blocks(pool_name_of(client, pool_name))
    if as_json:
        output.print_json(found)
    else:
        output.print_order(found.block_ids)


def flush(
    context: typer.Context,
    pool_name: PoolName = None,
    controller: ControllerAddress = CONTROLLER,
    as_json: AsJson = False,
) -> None:
    """Drop all cached content of a pool; refused while any of its blocks is held.

    Example: prefixd flush --pool smollm2
    """
    with settings_of(context).controller(controller) as client:
        found = client.flush_pool(pool_name_of(client, pool_name))
    if as_json:
        output.print_json(found)
    else:
        typer.echo(f"dropped {output.counted(found.dropped_block_count, 'cached block')}")
