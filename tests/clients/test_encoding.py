"""What no message can hold is refused before anything is sent."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prefixd.clients import (
    AsyncControllerClient,
    BeamSearch,
    Connection,
    ControllerClient,
    GenerateOptions,
    Identity,
    RequestInvalid,
    TokenPrompt,
    Watched,
    WorkerClient,
)

NOBODY = Connection("127.0.0.1:1")
"""Nothing is sent, so nobody needs to listen."""
SURROGATE = "\ud800"

CONTROLLER_CALLS: dict[str, Callable[[ControllerClient], Any]] = {
    "a number above its range": lambda client: client.block(pool_name="pool", block_id=2**63),
    "a token below its range": lambda client: client.match_prefix(pool_name="p", token_ids=[-1]),
    "half a character": lambda client: client.pool(SURROGATE),
    "a page size": lambda client: list(client.pools(page_size=2**31)),
    "digits that are not hexadecimal": lambda client: client.match_prefix(
        pool_name="p", token_ids=[1], identity=Identity(prompt_embeds_digests=("xyz",))
    ),
    "a revision": lambda client: client.watch_events(Watched("pool", after_revision=2**64)),
}
WORKER_CALLS: dict[str, Callable[[WorkerClient], Any]] = {
    "half a character": lambda client: client.count_tokens(SURROGATE),
    "a token": lambda client: client.generate(TokenPrompt((2**32,))),
    "a seed": lambda client: client.generate("hi", GenerateOptions(seed=2**64)),
    "a beam count": lambda client: client.stream(
        "hi", GenerateOptions(beam_search=BeamSearch(beam_count=2**40))
    ),
    "a version": lambda client: client.reload_weights(SURROGATE),
}


@pytest.mark.parametrize("call", CONTROLLER_CALLS.values(), ids=CONTROLLER_CALLS)
def test_the_controllers_client_raises_its_own_error(
    call: Callable[[ControllerClient], Any],
) -> None:
    """Whatever the method, it is a PrefixdError of the kind RequestInvalid."""
    with ControllerClient(NOBODY) as client, pytest.raises(RequestInvalid, match="cannot be"):
        call(client)


@pytest.mark.parametrize("call", WORKER_CALLS.values(), ids=WORKER_CALLS)
def test_the_workers_client_raises_its_own_error(call: Callable[[WorkerClient], Any]) -> None:
    """Streams raise it where they begin."""
    with WorkerClient(NOBODY) as client, pytest.raises(RequestInvalid, match="cannot be encoded"):
        call(client)


def test_the_asyncio_client_raises_the_same_error() -> None:
    """Both transports make their requests in one place."""

    async def ask() -> None:
        async with AsyncControllerClient(NOBODY) as client:
            await client.block(pool_name="pool", block_id=-(2**63) - 1)

    with pytest.raises(RequestInvalid):
        asyncio.run(ask())
