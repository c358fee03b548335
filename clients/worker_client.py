"""The worker's clients: answers as a whole or as a stream, chat, token counts."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from prefixd.clients import worker_calls
from prefixd.clients.answers import (
    Answer,
    Chunk,
    Conversation,
    GenerateOptions,
    Prompt,
    Reloaded,
    Started,
    TokenCount,
    WorkerInfo,
)
from prefixd.clients.connection import WORKER_ADDRESS_DEFAULT, Connection
from prefixd.clients.errors import AnswerIncomplete
from prefixd.clients.transport import (
    AsyncClient,
    AsyncStreamCall,
    AsyncTransport,
    StreamCall,
    SyncClient,
    Transport,
)
from prefixd.v1 import worker_pb2

OPTIONS_DEFAULT = GenerateOptions()
"""Greedy, with the server's own length limit."""
RELOAD_TIMEOUT_S_DEFAULT = 600.0
"""Deadline of a reload that names none: weights take a while to read."""


class AnswerStream:
    """An answer while it is generated: iterate for its chunks, then ask for the whole.

    Leaving the `with` block before the end cancels the call, and the worker closes the sequence.
    """

    def __init__(self, call: StreamCall[worker_pb2.GenerateResponse], *, sample_count: int) -> None:
        self._call = call
        self._parts = call.parts()
        self._reader = worker_calls.AnswerReader(sample_count)

    def started(self) -> Started:
        """Waits until the sequence runs and tells how much of its prompt was cached."""
        if self._reader.started is None:
            part = next(self._parts, None)
            if part is not None:
                self._reader.read(part)
        if self._reader.started is None:
            raise AnswerIncomplete("the answer's stream did not begin with its start")
        return self._reader.started

    def __iter__(self) -> Iterator[Chunk]:
        for part in self._parts:
            chunk = self._reader.read(part)
            if chunk is not None:
                yield chunk

    def answer(self) -> Answer:
        """Waits for the end and returns the complete answer, the first of several."""
        return self.answers()[0]

    def answers(self) -> tuple[Answer, ...]:
        """Waits for the end and returns all samples, or all hypotheses, best first."""
        for _ in self:
            pass
        return self._reader.complete()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()


class WorkerClient(SyncClient):
    """A synchronous client of a worker; safe to share between threads.

    Every method raises PrefixdError. `timeout_s` None is the connection's own deadline, for answers
    none at all: they take as long as they take.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        super().__init__(Transport(connection or Connection(WORKER_ADDRESS_DEFAULT)))

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> AnswerStream:
        """Begins an answer and returns its stream; use it in a `with` block."""
        request = worker_calls.generate_request(prompt, options)
        call = self._transport.generate(request, timeout_s=timeout_s)
        return AnswerStream(call, sample_count=options.sample_count)

    def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Generates a whole answer."""
        with self.stream(prompt, options, timeout_s=timeout_s) as stream:
            return stream.answer()

    def generate_all(
        self, prompt: Prompt, options: GenerateOptions, *, timeout_s: float | None = None
    ) -> tuple[Answer, ...]:
        """Generates all answers that the options ask for."""
        with self.stream(prompt, options, timeout_s=timeout_s) as stream:
            return stream.answers()

    def chat(
        self,
        conversation: Conversation,
        content: str,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Answers the user's next message and adds both to the conversation."""
        answer = self.generate(conversation.prompt(content), options, timeout_s=timeout_s)
        conversation.add_turn(content, answer)
        return answer

    def count_tokens(self, prompt: Prompt, *, timeout_s: float | None = None) -> TokenCount:
        """Tokenizes a prompt as an answer would."""
        return self._transport.call(worker_calls.count_tokens(prompt), timeout_s=timeout_s)

    def worker_info(self, *, timeout_s: float | None = None) -> WorkerInfo:
        """Describes the worker and its pool."""
        return self._transport.call(worker_calls.worker_info(), timeout_s=timeout_s)

    def reload_weights(
        self,
        model_version: str,
        *,
        folder: str = "",
        timeout_s: float = RELOAD_TIMEOUT_S_DEFAULT,
    ) -> Reloaded:
        """Makes the worker read its model's weights again, and drops what the old ones cached.

        `folder` is one of the worker's machine; empty: the one that it read last.
        """
        call = worker_calls.reload_weights(model_version=model_version, folder=folder)
        return self._transport.call(call, timeout_s=timeout_s)


class AsyncAnswerStream:
    """AnswerStream's twin for asyncio."""

    def __init__(
        self, call: AsyncStreamCall[worker_pb2.GenerateResponse], *, sample_count: int
    ) -> None:
        self._call = call
        self._parts = call.parts()
        self._reader = worker_calls.AnswerReader(sample_count)

    async def started(self) -> Started:
        """Waits until the sequence runs and tells how much of its prompt was cached."""
        if self._reader.started is None:
            part = await anext(self._parts, None)
            if part is not None:
                self._reader.read(part)
        if self._reader.started is None:
            raise AnswerIncomplete("the answer's stream did not begin with its start")
        return self._reader.started

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for part in self._parts:
            chunk = self._reader.read(part)
            if chunk is not None:
                yield chunk

    async def answer(self) -> Answer:
        """Waits for the end and returns the complete answer, the first of several."""
        return (await self.answers())[0]

    async def answers(self) -> tuple[Answer, ...]:
        """Waits for the end and returns all samples, or all hypotheses, best first."""
        async for _ in self:
            pass
        return self._reader.complete()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()


class AsyncWorkerClient(AsyncClient):
    """WorkerClient's twin for asyncio; made inside the running loop."""

    def __init__(self, connection: Connection | None = None) -> None:
        super().__init__(AsyncTransport(connection or Connection(WORKER_ADDRESS_DEFAULT)))

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> AsyncAnswerStream:
        """Begins an answer and returns its stream; use it in an `async with` block."""
        request = worker_calls.generate_request(prompt, options)
        call = self._transport.generate(request, timeout_s=timeout_s)
        return AsyncAnswerStream(call, sample_count=options.sample_count)

    async def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Generates a whole answer."""
        async with self.stream(prompt, options, timeout_s=timeout_s) as stream:
            return await stream.answer()

    async def generate_all(
        self, prompt: Prompt, options: GenerateOptions, *, timeout_s: float | None = None
    ) -> tuple[Answer, ...]:
        """Generates all answers that the options ask for."""
        async with self.stream(prompt, options, timeout_s=timeout_s) as stream:
            return await stream.answers()

    async def chat(
        self,
        conversation: Conversation,
        content: str,
        options: GenerateOptions = OPTIONS_DEFAULT,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Answers the user's next message and adds both to the conversation."""
        answer = await self.generate(conversation.prompt(content), options, timeout_s=timeout_s)
        conversation.add_turn(content, answer)
        return answer

    async def count_tokens(self, prompt: Prompt, *, timeout_s: float | None = None) -> TokenCount:
        """Tokenizes a prompt as an answer would."""
        return await self._transport.call(worker_calls.count_tokens(prompt), timeout_s=timeout_s)

    async def worker_info(self, *, timeout_s: float | None = None) -> WorkerInfo:
        """Describes the worker and its pool."""
        return await self._transport.call(worker_calls.worker_info(), timeout_s=timeout_s)

    async def reload_weights(
        self,
        model_version: str,
        *,
        folder: str = "",
        timeout_s: float = RELOAD_TIMEOUT_S_DEFAULT,
    ) -> Reloaded:
        """Makes the worker read its model's weights again, and drops what the old ones cached.

        `folder` is one of the worker's machine; empty: the one that it read last.
        """
        call = worker_calls.reload_weights(model_version=model_version, folder=folder)
        return await self._transport.call(call, timeout_s=timeout_s)
