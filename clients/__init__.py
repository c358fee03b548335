"""Typed Python clients of prefixd, synchronous and asyncio.

    from prefixd.clients import Connection, ControllerClient, WorkerClient

    with WorkerClient(Connection("127.0.0.1:7601")) as worker:
        print(worker.generate("The capital of France is").text)

Results are frozen values; every error is a PrefixdError, whose `reason` is the contract.
"""

from prefixd.clients.answers import (
    Answer,
    BeamSearch,
    ChatPrompt,
    Chunk,
    Conversation,
    FinishReason,
    GenerateOptions,
    Message,
    Prompt,
    Reloaded,
    Started,
    TokenCount,
    TokenPrompt,
    WorkerInfo,
)
from prefixd.clients.connection import (
    CONTROLLER_ADDRESS_DEFAULT,
    WORKER_ADDRESS_DEFAULT,
    Connection,
    Tls,
)
from prefixd.clients.controller_client import AsyncControllerClient, ControllerClient
from prefixd.clients.errors import (
    AddressInvalid,
    AnswerIncomplete,
    CallRefused,
    DeadlinePassed,
    PrefixdError,
    RequestInvalid,
    ServerUnreachable,
)
from prefixd.clients.event_stream import AsyncEventStream, EventStream
from prefixd.clients.events import BlockKey, Cleared, Event, Events, Removed, Stored, Watched
from prefixd.clients.results import (
    Block,
    BlockContent,
    BlockHolders,
    BlockState,
    BlockTable,
    Evicted,
    Flushed,
    FreeOrder,
    Identity,
    LoraAdapter,
    MultimodalItem,
    Pool,
    PoolStatistics,
    PrefixMatch,
    Published,
    Sequence,
    SequenceTables,
    ServerInfo,
    Verified,
)
from prefixd.clients.worker_client import (
    AnswerStream,
    AsyncAnswerStream,
    AsyncWorkerClient,
    WorkerClient,
)

__all__ = [
    "CONTROLLER_ADDRESS_DEFAULT",
    "WORKER_ADDRESS_DEFAULT",
    "AddressInvalid",
    "Answer",
    "AnswerIncomplete",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncControllerClient",
    "AsyncEventStream",
    "AsyncWorkerClient",
    "BeamSearch",
    "Block",
    "BlockContent",
    "BlockHolders",
    "BlockKey",
    "BlockState",
    "BlockTable",
    "CallRefused",
    "ChatPrompt",
    "Chunk",
    "Cleared",
    "Connection",
    "ControllerClient",
    "Conversation",
    "DeadlinePassed",
    "Event",
    "EventStream",
    "Events",
    "Evicted",
    "FinishReason",
    "Flushed",
    "FreeOrder",
    "GenerateOptions",
    "Identity",
    "LoraAdapter",
    "Message",
    "MultimodalItem",
    "Pool",
    "PoolStatistics",
    "PrefixMatch",
    "PrefixdError",
    "Prompt",
    "Published",
    "Reloaded",
    "Removed",
    "RequestInvalid",
    "Sequence",
    "SequenceTables",
    "ServerInfo",
    "ServerUnreachable",
    "Started",
    "Stored",
    "Tls",
    "TokenCount",
    "TokenPrompt",
    "Verified",
    "Watched",
    "WorkerClient",
    "WorkerInfo",
]
