"""The asynchronous client: the same calls and names as `gateway.client.blocking`, awaited.

async with AsyncClient(url, token) as client, await client.kernels.create() as kernel:
    async for event in kernel.stream("6 * 7"):
        print(event)
"""

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import httpx2
from anyio import move_on_after, to_thread

from gateway.client import calls, connection, repeating
from gateway.client.answers import Document, problem, require_file
from gateway.client.calls import Call
from gateway.client.errors import ClientError, ConnectionLost, is_gone
from gateway.client.repeating import RECONNECT, Attempts, Contact, Following, OnReconnect
from gateway.client.results import Result
from gateway.protocol.events import Event

T = TypeVar("T")

CLEANUP_TIMEOUT = 15.0
"""Seconds that deleting a kernel may take when its task is being cancelled."""


class AsyncClient:
    """A connection to one gateway, for any number of tasks at once. `transport` is for tests and for proxies.

    `reconnect`: seconds to go on trying when a connection breaks, as when the gateway is restarted; 0: none. `on_reconnect` is
    called with the error when that begins, and with None when a gateway answers again.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        reconnect: float = RECONNECT,
        on_reconnect: OnReconnect | None = None,
    ) -> None:
        self.url = connection.base_url(url)
        self.contact = Contact(self.url, reconnect, on_reconnect)
        wire = transport or httpx2.AsyncHTTPTransport(limits=connection.LIMITS, socket_options=connection.KEEPALIVE)
        self._http = httpx2.AsyncClient(transport=wire, **connection.options(self.url, token))
        self.kernels = AsyncKernels(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def kernelspecs(self) -> Document:
        """`{"default": name, "kernelspecs": [...]}`"""
        return await self.send(calls.kernelspecs())

    async def send(self, call: Call[T], content: bytes | AsyncIterator[bytes] | None = None) -> T:
        attempts = Attempts(self.contact, call)
        while True:
            try:
                return await self._send(attempts, call, content)
            except ClientError as error:
                wait = attempts.wait_after(error)
            await repeating.async_pause(wait)

    async def _send(self, attempts: Attempts, call: Call[T], content: bytes | AsyncIterator[bytes] | None) -> T:
        json, headers = connection.body(call)
        with connection.translated(self.url):
            response = await self._http.request(
                call.method, call.path, content=content or json, headers=headers, timeout=connection.deadlines(call)
            )
        if not attempts.accepts(response):
            raise problem(response)
        attempts.answered()
        return call.read(response)

    async def follow(self, following: Following) -> AsyncIterator[Event]:
        """The events of an execution, as they come, up to and with `ended`, each once however often the connection breaks."""
        while True:
            try:
                async with aclosing(self._follow(following)) as events:
                    async for event in events:
                        yield event
                return
            except ClientError as error:
                if following.ended:
                    return
                wait = following.wait_after(error)
            await repeating.async_pause(wait)

    async def _follow(self, following: Following) -> AsyncGenerator[Event]:
        """One attempt at it."""
        call = following.next_call()
        json, headers = connection.body(call)
        with connection.translated(self.url):
            async with self._http.stream(
                call.method, call.path, content=json, headers=headers, timeout=connection.deadlines(call)
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise problem(response)
                following.answered()
                async for chunk in response.aiter_bytes():
                    for event in following.feed(chunk):
                        yield event
        following.check_end()

    async def download(self, call: Call[bytes], local: Path) -> None:
        """GET into a file; it appears whole or not at all."""
        attempts = Attempts(self.contact, call)
        while True:
            try:
                return await self._download(attempts, call, local)
            except ClientError as error:
                wait = attempts.wait_after(error)
            await repeating.async_pause(wait)

    async def _download(self, attempts: Attempts, call: Call[bytes], local: Path) -> None:
        with connection.translated(self.url), connection.whole_file(local) as file:
            async with self._http.stream(call.method, call.path, timeout=connection.deadlines(call)) as response:
                if not response.is_success:
                    await response.aread()
                    raise problem(response)
                attempts.answered()
                require_file(response)
                async for chunk in response.aiter_bytes():
                    await to_thread.run_sync(file.write, chunk)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """A local file may be slow to read: it must not hold up the event loop."""
    while chunk := await to_thread.run_sync(file.read, 65_536):
        yield chunk


class AsyncKernels:
    """The kernels of a gateway."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        spec: str | None = None,
        limits: Document | None = None,
        env: Mapping[str, str] | None = None,
        label: str | None = None,
        *,
        idempotency_key: str | None = None,
        **more: Any,
    ) -> "AsyncKernel":
        """A new kernel, once it answers; raises `ApiError` with the reason and the last lines of its log otherwise.

        `limits`: memory (bytes or "1g"), cpus, pids. `more`: any other member of the request that the gateway takes.
        `idempotency_key`: whoever asks again with the same one, in another process even, gets the same kernel.
        """
        return AsyncKernel(
            self._client, await self._client.send(calls.create_kernel(spec, limits, env, label, idempotency_key, **more))
        )

    async def list(self) -> "builtins.list[AsyncKernel]":
        return [AsyncKernel(self._client, found) for found in await self._client.send(calls.list_kernels())]

    async def get(self, kernel_id: str) -> "AsyncKernel":
        return AsyncKernel(self._client, await self._client.send(calls.get_kernel(kernel_id)))


class AsyncKernel:
    """One kernel. As a context manager it is deleted at the end. `document` is what the gateway last said of it."""

    def __init__(self, client: AsyncClient, document: Document) -> None:
        self._client = client
        self.document = document
        self.id = str(document["id"])
        self.files = AsyncFiles(client, self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = CLEANUP_TIMEOUT if error else CLEANUP_TIMEOUT + self._client.contact.limit
        with move_on_after(seconds, shield=True) as scope:  # a cancelled task deletes its kernel all the same
            try:
                await self.delete()
            except ClientError as failure:
                if error is None and not is_gone(failure):  # an error inside says more than a failed clean-up
                    raise
        if scope.cancelled_caught and error is None:
            raise ConnectionLost(self._client.url, f"kernel {self.id} was not deleted within {seconds:g} s")

    async def execute(
        self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any
    ) -> Result:
        """Run a cell and wait for its end. `timeout` in seconds.

        `options`: silent, store_history, stop_on_error, on_disconnect ("interrupt" cancels the cell when the connection goes
        away, also when a gateway is restarted). The connection may break: the request is sent again with the same key, and the
        Result is that of the one execution. `idempotency_key` is for a program that may ask again itself.
        """
        return await self._client.send(calls.execute(self.id, code, idempotency_key, timeout=timeout, **options))

    def stream(
        self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any
    ) -> AsyncIterator[Event]:
        """Run a cell and yield its events as they come, each once; a broken connection is taken up where it broke.

        `options` are those of `execute`, and allow_stdin, answered with `answer`.
        """
        call = calls.stream(self.id, code, idempotency_key, timeout=timeout, **options)
        return self._client.follow(Following(self._client.contact, call, self.id))

    async def submit(
        self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any
    ) -> str:
        """Have a cell run and wait for nothing; returns the execution id, for `wait`, `events` and `result`."""
        return await self._client.send(calls.submit(self.id, code, idempotency_key, timeout=timeout, **options))

    async def wait(self, execution_id: str) -> Result:
        """The Result of an execution once it has ended."""
        found = await self.result(execution_id)
        if found.ended:
            return found
        async for _ in self.events(execution_id, found.last_seq or 0):
            pass
        return await self.result(execution_id)

    def events(self, execution_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The events of an execution numbered above `after`, those that were and those to come, up to `ended`, each once."""
        call = calls.follow(self.id, execution_id, after)
        return self._client.follow(Following(self._client.contact, call, self.id, execution_id, after))

    async def executions(self, limit: int | None = None, before: int | None = None) -> list[Document]:
        """Summaries of the kernel's executions, newest first. `before`: only those with a lower `number`, for the next page."""
        return await self._client.send(calls.list_executions(self.id, limit, before))

    async def data(self, execution_id: str, seq: int, media: str) -> bytes:
        """One value of the MIME bundle of event `seq` as bytes, as "image/png"."""
        return await self._client.send(calls.event_data(self.id, execution_id, seq, media))

    async def result(self, execution_id: str) -> Result:
        """How an execution stands, running or ended."""
        return await self._client.send(calls.get_result(self.id, execution_id))

    async def cancel(self, execution_id: str) -> None:
        await self._client.send(calls.cancel(self.id, execution_id))

    async def answer(self, execution_id: str, value: str) -> None:
        """The text that an `input_request` of this execution waits for."""
        await self._client.send(calls.answer(self.id, execution_id, value))

    async def interrupt(self) -> str | None:
        """Interrupt the running cell; returns its execution id, None when none runs."""
        return await self._client.send(calls.interrupt(self.id))

    async def restart(self) -> None:
        """A new process under the same id; variables are lost, files stay."""
        self.document = await self._client.send(calls.restart(self.id))

    async def delete(self) -> None:
        await self._client.send(calls.delete_kernel(self.id))

    async def info(self) -> Document:
        self.document = await self._client.send(calls.get_kernel(self.id))
        return self.document


class AsyncFiles:
    """The work directory of one kernel. Paths are relative to it."""

    def __init__(self, client: AsyncClient, kernel_id: str) -> None:
        self._client = client
        self._kernel_id = kernel_id

    async def write(self, path: str, data: bytes | str | Path | BinaryIO) -> int:
        """Write one file from bytes, text, a local file (Path) or an open one; returns its size in bytes."""
        call = calls.write_file(self._kernel_id, path)
        if isinstance(data, Path):
            with data.open("rb") as file:
                return await self._client.send(call, _chunks(file))
        if isinstance(data, bytes):
            return await self._client.send(call, data)
        return await self._client.send(call, bytes(data, "utf-8") if isinstance(data, str) else _chunks(data))

    async def read(self, path: str) -> bytes:
        return await self._client.send(calls.read_file(self._kernel_id, path))

    async def download(self, path: str, local: Path | str) -> Path:
        """Copy a file to `local` (a directory keeps the name); returns where it is."""
        target = calls.download_target(path, Path(local))
        await self._client.download(calls.read_file(self._kernel_id, path), target)
        return target

    async def upload(self, local: Path | str, path: str | None = None) -> builtins.list[str]:
        """Copy a local file, or all files below a local directory; returns the paths they got."""
        found = calls.local_files(Path(local), path)
        for source, target in found:
            await self.write(target, source)
        return [target for _, target in found]

    async def list(self, directory: str = "") -> builtins.list[Document]:
        return await self._client.send(calls.list_files(self._kernel_id, directory))

    async def delete(self, path: str) -> None:
        await self._client.send(calls.delete_file(self._kernel_id, path))
