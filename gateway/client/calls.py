"""Every request that the clients send, as data: said once, sent by both.

A `Call` is one request with the function that reads its answer. `Client` and `AsyncClient` differ only in how they send
it. docs/native-api.md is the contract that this file writes down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

import httpx2

from gateway.client.answers import JSON_LINES, Document, content, document, member, nothing, raw, result
from gateway.client.results import Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `patient` means that the answer may take as long as a cell does: no read timeout then.

    `key` is its Idempotency-Key: sent again with the same one it does nothing twice.
    """

    method: str
    path: str
    read: Callable[[httpx2.Response], T]
    json: Document | None = None
    patient: bool = False
    key: str | None = None
    accept: str | None = None

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again by itself when it is unknown what became of it."""
        return self.method in ("GET", "DELETE") or self.key is not None


def idempotency_key(given: str | None) -> str:
    """The caller's key, or a new one."""
    if given is None:
        return str(uuid4())
    if not 1 <= len(given) <= 255 or not (given.isascii() and given.isprintable()):
        raise ValueError("an idempotency key is 1 to 255 printable ASCII characters")
    return given


def kernelspecs() -> Call[Document]:
    return Call("GET", "/v1/kernelspecs", document)


def list_kernels() -> Call[list[Document]]:
    return Call("GET", "/v1/kernels", member("kernels"))


def create_kernel(
    spec: str | None, limits: Document | None, env: Mapping[str, str] | None, label: str | None, key: str | None, **more: Any
) -> Call[Document]:
    body = {"spec": spec, "limits": limits, "env": dict(env) if env else None, "label": label, **more}
    given = {key: value for key, value in body.items() if value is not None}
    return Call("POST", "/v1/kernels", document, json=given, patient=True, key=idempotency_key(key))


def get_kernel(kernel_id: str) -> Call[Document]:
    return Call("GET", _kernel(kernel_id), document)


def delete_kernel(kernel_id: str) -> Call[None]:
    return Call("DELETE", _kernel(kernel_id), nothing)


def interrupt(kernel_id: str) -> Call[str | None]:
    return Call("POST", f"{_kernel(kernel_id)}/interrupt", member("execution_id"))


def restart(kernel_id: str) -> Call[Document]:
    return Call("POST", f"{_kernel(kernel_id)}/restart", document, patient=True)


def execute(kernel_id: str, code: str, key: str | None, **options: Any) -> Call[Result]:
    """`options` are the members of the request body; those that are None keep the gateway's default."""
    return _execute(kernel_id, code, key, options, result)


def stream(kernel_id: str, code: str, key: str | None, **options: Any) -> Call[None]:
    """The same; the answer is the events, line by line."""
    return _execute(kernel_id, code, key, options, nothing, accept=JSON_LINES)


def submit(kernel_id: str, code: str, key: str | None, **options: Any) -> Call[str]:
    """The same, answered at once with the id of the execution."""
    return _execute(kernel_id, code, key, options | {"detach": True}, member("execution_id"))


def _execute(
    kernel_id: str,
    code: str,
    key: str | None,
    options: Document,
    read: Callable[[httpx2.Response], T],
    accept: str | None = None,
) -> Call[T]:
    body = {"code": code} | {name: value for name, value in options.items() if value is not None}
    path = f"{_kernel(kernel_id)}/execute"
    return Call("POST", path, read, json=body, patient=True, key=idempotency_key(key), accept=accept)


def list_executions(kernel_id: str, limit: int | None, before: int | None) -> Call[list[Document]]:
    query = {name: value for name, value in (("limit", limit), ("before", before)) if value is not None}
    return Call("GET", f"{_kernel(kernel_id)}/executions{'?' if query else ''}{urlencode(query)}", member("executions"))


def follow(kernel_id: str, execution_id: str, after: int) -> Call[None]:
    """The answer is the events numbered above `after`, line by line, those that are there and those to come."""
    path = f"{_execution(kernel_id, execution_id)}/events?after={after}"
    return Call("GET", path, nothing, patient=True, accept=JSON_LINES)


def event_data(kernel_id: str, execution_id: str, seq: int, media: str) -> Call[bytes]:
    path = f"{_execution(kernel_id, execution_id)}/events/{seq}/data"
    return Call("GET", f"{path}?type={quote(media, safe='')}", raw, patient=True, accept="*/*")


def get_result(kernel_id: str, execution_id: str) -> Call[Result]:
    return Call("GET", _execution(kernel_id, execution_id), result)


def cancel(kernel_id: str, execution_id: str) -> Call[None]:
    return Call("DELETE", _execution(kernel_id, execution_id), nothing)


def answer(kernel_id: str, execution_id: str, value: str) -> Call[None]:
    return Call("POST", f"{_execution(kernel_id, execution_id)}/input", nothing, json={"value": value})


def list_files(kernel_id: str, directory: str) -> Call[list[Document]]:
    path = file_path(kernel_id, directory).rstrip("/")
    return Call("GET", f"{path}/" if directory.strip("/") else path, member("entries"))


def delete_file(kernel_id: str, path: str) -> Call[None]:
    return Call("DELETE", file_path(kernel_id, path), nothing)


def write_file(kernel_id: str, path: str) -> Call[int]:
    """The body is the file. The answer is its size in bytes."""
    return Call("PUT", file_path(kernel_id, path), member("size"), patient=True)


def read_file(kernel_id: str, path: str) -> Call[bytes]:
    return Call("GET", file_path(kernel_id, path), content, patient=True)


def file_path(kernel_id: str, path: str) -> str:
    """Where the file is in the API. Each part is quoted, so that `a b/50%#1.csv` arrives as it is called.

    Dot parts are quoted too: resolved on the way they would name another route, where the gateway can say what is wrong.
    """
    parts = [part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="") for part in path.split("/")]
    return f"{_kernel(kernel_id)}/files/" + "/".join(parts)


def _kernel(kernel_id: str) -> str:
    return f"/v1/kernels/{quote(kernel_id, safe='')}"


def _execution(kernel_id: str, execution_id: str) -> str:
    return f"{_kernel(kernel_id)}/executions/{quote(execution_id, safe='')}"


def download_target(path: str, local: Path) -> Path:
    """Where a download goes: `local`, or the file's own name inside it when it is a directory."""
    return local / path.rstrip("/").rpartition("/")[2] if local.is_dir() else local


def local_files(local: Path, path: str | None) -> list[tuple[Path, str]]:
    """What an upload of `local` consists of: each file with the path it gets. A directory brings all files below it."""
    root = path if path is not None else local.resolve().name
    if not local.is_dir():
        return [(local, root)]
    below = sorted(found for found in local.rglob("*") if found.is_file())
    return [(found, f"{root}/{found.relative_to(local).as_posix()}") for found in below]
