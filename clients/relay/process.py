"""Runs a relay until its process is told to end."""

import asyncio
import signal
import time
from collections.abc import Callable

import zmq

from prefixd.clients.connection import Connection
from prefixd.clients.controller_client import AsyncControllerClient
from prefixd.clients.errors import PrefixdError
from prefixd.clients.relay.follow import Relay
from prefixd.clients.relay.publisher import Publication, Publisher
from prefixd.clients.relay.vllm_events import HashForm


async def relay_pool(
    connection: Connection,
    publication: Publication,
    *,
    pool_name: str,
    form: HashForm,
    on_started: Callable[[Publisher], None],
) -> None:
    """Publishes a pool's events until SIGTERM. Raises PrefixdError."""
    try:
        publisher = Publisher(publication, clock=time.time)
    except zmq.ZMQError as error:
        raise PrefixdError(f"cannot publish on {publication.endpoint}: {error}") from error
    async with AsyncControllerClient(connection) as client:
        relaying = asyncio.ensure_future(
            Relay(client, publisher, pool_name=pool_name, form=form).run()
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, relaying.cancel)
        on_started(publisher)
        try:
            await relaying
        except asyncio.CancelledError:
            pass
        except zmq.ZMQError as error:
            raise PrefixdError(f"the relay's socket failed: {error}") from error
        finally:
            publisher.close()
