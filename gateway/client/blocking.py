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

from gateway.client import calls, connection
from gateway.client.answers import JSON_LINES, Document, EventLines, problem, require_file
from gateway.client.calls import Call
from gateway.client.errors import ClientError, ConnectionLost, is_gone
from gateway.client.results import Result
from gateway.protocol.events import Event

T = TypeVar("T")


class Client:
    """A connection to one gateway. Threads may share it. `transport` is for tests and for proxies."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, transport: httpx2.BaseTransport | None = None
    ) -> None:
        self.url = connection.base_url(url)
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
        json, headers = connection.body(call)
        with connection.translated(self.url):
            response = self._http.request(
                call.method, call.path, content=content or json, headers=headers, timeout=connection.deadlines(call)
            )
        if not response.is_success:
            raise problem(response)
        return call.read(response)

    def events(self, call: Call[Any]) -> Iterator[Event]:
        """The events of an execute call, as they come, up to and with `ended`."""
        lines = EventLines()
        json, headers = connection.body(call)
        headers["Accept"] = JSON_LINES
        with (
            connection.translated(self.url, lines),
            self._http.stream(
                call.method, call.path, content=json, headers=headers, timeout=connection.deadlines(call)
            ) as response,
        ):
            if not response.is_success:
                response.read()
                raise problem(response)
            for chunk in response.iter_bytes():
                yield from lines.feed(chunk)
        if not lines.ended:
            raise ConnectionLost(self.url, "no `ended` event came", lines.execution_id)

    def download(self, path: str, local: Path) -> None:
        """GET into a file; it appears whole or not at all."""
        with (
            connection.translated(self.url),
            connection.whole_file(local) as file,
            self._http.stream("GET", path, timeout=connection.PATIENT) as response,
        ):
            if not response.is_success:
                response.read()
                raise problem(response)
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
        **more: Any,
    ) -> "Kernel":
        """A new kernel, once it answers; raises `ApiError` with the reason and the last lines of its log otherwise.

        `limits`: memory (bytes or "1g"), cpus, pids. `more`: any other member of the request that the gateway takes.
        """
        return Kernel(self._client, self._client.send(calls.create_kernel(spec, limits, env, label, **more)))

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

    def execute(self, code: str, *, timeout: float | None = None, **options: Any) -> Result:
        """Run a cell and wait for its end. `options`: silent, store_history, stop_on_error. `timeout` in seconds."""
        return self._client.send(calls.execute(self.id, code, timeout=timeout, **options))

    def stream(self, code: str, *, timeout: float | None = None, **options: Any) -> Iterator[Event]:
        """Run a cell and yield its events as they come. `options` also: allow_stdin, answered with `answer`."""
        return self._client.events(calls.execute(self.id, code, timeout=timeout, **options))

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
        self._client.download(calls.file_path(self._kernel_id, path), target)
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
