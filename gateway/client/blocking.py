"""The blocking client: for scripts, notebooks and the command line.

with Client("http://127.0.0.1:8890", token) as client, client.kernels.create() as kernel:
    print(kernel.execute("6 * 7").text)
"""

import builtins
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import httpx2

from gateway.client import calls, connection, repeating
from gateway.client.answers import Document, problem, require_file
from gateway.client.calls import Call
from gateway.client.errors import ClientError, is_gone
from gateway.client.repeating import RECONNECT, Attempts, Contact, Following, OnReconnect
from gateway.client.results import Result
from gateway.protocol.events import Event

T = TypeVar("T")


class Client:
    """A connection to one gateway. Threads may share it. `transport` is for tests and for proxies.

    `reconnect`: seconds to go on trying when a connection breaks, as when the gateway is restarted; 0: none. `on_reconnect` is
    called with the error when that begins, and with None when a gateway answers again.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx2.BaseTransport | None = None,
        reconnect: float = RECONNECT,
        on_reconnect: OnReconnect | None = None,
    ) -> None:
        self.url = connection.base_url(url)
        self.contact = Contact(self.url, reconnect, on_reconnect)
        wire = transport or httpx2.HTTPTransport(limits=connection.LIMITS, socket_options=connection.KEEPALIVE)
        self._http = httpx2.Client(transport=wire, **connection.options(self.url, token))
        self.kernels = Kernels(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def kernelspecs(self) -> Document:
        """`{"default": name, "kernelspecs": [...]}`"""
        return self.send(calls.kernelspecs())

    def send(self, call: Call[T], content: bytes | BinaryIO | None = None) -> T:
        attempts = Attempts(self.contact, call)
        while True:
            try:
                return self._send(attempts, call, content)
            except ClientError as error:
                wait = attempts.wait_after(error)
            repeating.pause(wait)

    def _send(self, attempts: Attempts, call: Call[T], content: bytes | BinaryIO | None) -> T:
        json, headers = connection.body(call)
        with connection.translated(self.url):
            response = self._http.request(
                call.method, call.path, content=content or json, headers=headers, timeout=connection.deadlines(call)
            )
        if not attempts.accepts(response):
            raise problem(response)
        attempts.answered()
        return call.read(response)

    def follow(self, following: Following) -> Iterator[Event]:
        """The events of an execution, as they come, up to and with `ended`, each once however often the connection breaks."""
        while True:
            try:
                yield from self._follow(following)
                return
            except ClientError as error:
                if following.ended:
                    return
                wait = following.wait_after(error)
            repeating.pause(wait)

    def _follow(self, following: Following) -> Iterator[Event]:
        """One attempt at it."""
        call = following.next_call()
        json, headers = connection.body(call)
        with (
            connection.translated(self.url),
            self._http.stream(
                call.method, call.path, content=json, headers=headers, timeout=connection.deadlines(call)
            ) as response,
        ):
            if not response.is_success:
                response.read()
                raise problem(response)
            following.answered()
            for chunk in response.iter_bytes():
                yield from following.feed(chunk)
        following.check_end()

    def download(self, call: Call[bytes], local: Path) -> None:
        """GET into a file; it appears whole or not at all."""
        attempts = Attempts(self.contact, call)
        while True:
            try:
                return self._download(attempts, call, local)
            except ClientError as error:
                wait = attempts.wait_after(error)
            repeating.pause(wait)

    def _download(self, attempts: Attempts, call: Call[bytes], local: Path) -> None:
        with (
            connection.translated(self.url),
            connection.whole_file(local) as file,
            self._http.stream(call.method, call.path, timeout=connection.deadlines(call)) as response,
        ):
            if not response.is_success:
                response.read()
                raise problem(response)
            attempts.answered()
            require_file(response)
            for chunk in response.iter_bytes():
                file.write(chunk)


class Kernels:
    """The kernels of a gateway."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        spec: str | None = None,
        limits: Document | None = None,
        env: Mapping[str, str] | None = None,
        label: str | None = None,
        *,
        idempotency_key: str | None = None,
        **more: Any,
    ) -> "Kernel":
        """A new kernel, once it answers; raises `ApiError` with the reason and the last lines of its log otherwise.

        `limits`: memory (bytes or "1g"), cpus, pids. `more`: any other member of the request that the gateway takes.
        `idempotency_key`: whoever asks again with the same one, in another process even, gets the same kernel.
        """
        return Kernel(self._client, self._client.send(calls.create_kernel(spec, limits, env, label, idempotency_key, **more)))

    def list(self) -> "builtins.list[Kernel]":
        return [Kernel(self._client, found) for found in self._client.send(calls.list_kernels())]

    def get(self, kernel_id: str) -> "Kernel":
        return Kernel(self._client, self._client.send(calls.get_kernel(kernel_id)))


class Kernel:
    """One kernel. As a context manager it is deleted at the end. `document` is what the gateway last said of it."""

    def __init__(self, client: Client, document: Document) -> None:
        self._client = client
        self.document = document
        self.id = str(document["id"])
        self.files = Files(client, self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.delete()
        except ClientError as failure:
            if error is None and not is_gone(failure):  # an error inside says more than a failed clean-up
                raise

    def execute(self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any) -> Result:
        """Run a cell and wait for its end. `timeout` in seconds.

        `options`: silent, store_history, stop_on_error, on_disconnect ("interrupt" cancels the cell when the connection goes
        away, also when a gateway is restarted). The connection may break: the request is sent again with the same key, and the
        Result is that of the one execution. `idempotency_key` is for a program that may ask again itself.
        """
        return self._client.send(calls.execute(self.id, code, idempotency_key, timeout=timeout, **options))

    def stream(
        self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any
    ) -> Iterator[Event]:
        """Run a cell and yield its events as they come, each once; a broken connection is taken up where it broke.

        `options` are those of `execute`, and allow_stdin, answered with `answer`.
        """
        call = calls.stream(self.id, code, idempotency_key, timeout=timeout, **options)
        return self._client.follow(Following(self._client.contact, call, self.id))

    def submit(self, code: str, *, timeout: float | None = None, idempotency_key: str | None = None, **options: Any) -> str:
        """Have a cell run and wait for nothing; returns the execution id, for `wait`, `events` and `result`."""
        return self._client.send(calls.submit(self.id, code, idempotency_key, timeout=timeout, **options))

    def wait(self, execution_id: str) -> Result:
        """The Result of an execution once it has ended."""
        found = self.result(execution_id)
        if found.ended:
            return found
        for _ in self.events(execution_id, found.last_seq or 0):
            pass
        return self.result(execution_id)

    def events(self, execution_id: str, after: int = 0) -> Iterator[Event]:
        """The events of an execution numbered above `after`, those that were and those to come, up to `ended`, each once."""
        call = calls.follow(self.id, execution_id, after)
        return self._client.follow(Following(self._client.contact, call, self.id, execution_id, after))

    def executions(self, limit: int | None = None, before: int | None = None) -> list[Document]:
        """Summaries of the kernel's executions, newest first. `before`: only those with a lower `number`, for the next page."""
        return self._client.send(calls.list_executions(self.id, limit, before))

    def data(self, execution_id: str, seq: int, media: str) -> bytes:
        """One value of the MIME bundle of event `seq` as bytes, as "image/png"."""
        return self._client.send(calls.event_data(self.id, execution_id, seq, media))

    def result(self, execution_id: str) -> Result:
        """How an execution stands, running or ended."""
        return self._client.send(calls.get_result(self.id, execution_id))

    def cancel(self, execution_id: str) -> None:
        self._client.send(calls.cancel(self.id, execution_id))

    def answer(self, execution_id: str, value: str) -> None:
        """The text that an `input_request` of this execution waits for."""
        self._client.send(calls.answer(self.id, execution_id, value))

    def interrupt(self) -> str | None:
        """Interrupt the running cell; returns its execution id, None when none runs."""
        return self._client.send(calls.interrupt(self.id))

    def restart(self) -> None:
        """A new process under the same id; variables are lost, files stay."""
        self.document = self._client.send(calls.restart(self.id))

    def delete(self) -> None:
        self._client.send(calls.delete_kernel(self.id))

    def info(self) -> Document:
        self.document = self._client.send(calls.get_kernel(self.id))
        return self.document


class Files:
    """The work directory of one kernel. Paths are relative to it."""

    def __init__(self, client: Client, kernel_id: str) -> None:
        self._client = client
        self._kernel_id = kernel_id

    def write(self, path: str, data: bytes | str | Path | BinaryIO) -> int:
        """Write one file from bytes, text, a local file (Path) or an open one; returns its size in bytes."""
        call = calls.write_file(self._kernel_id, path)
        if isinstance(data, Path):
            with data.open("rb") as file:
                return self._client.send(call, file)
        return self._client.send(call, data.encode() if isinstance(data, str) else data)

    def read(self, path: str) -> bytes:
        return self._client.send(calls.read_file(self._kernel_id, path))

    def download(self, path: str, local: Path | str) -> Path:
        """Copy a file to `local` (a directory keeps the name); returns where it is."""
        target = calls.download_target(path, Path(local))
        self._client.download(calls.read_file(self._kernel_id, path), target)
        return target

    def upload(self, local: Path | str, path: str | None = None) -> builtins.list[str]:
        """Copy a local file, or all files below a local directory; returns the paths they got."""
        found = calls.local_files(Path(local), path)
        for source, target in found:
            self.write(target, source)
        return [target for _, target in found]

    def list(self, directory: str = "") -> builtins.list[Document]:
        return self._client.send(calls.list_files(self._kernel_id, directory))

    def delete(self, path: str) -> None:
        self._client.send(calls.delete_file(self._kernel_id, path))
