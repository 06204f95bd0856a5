"""Files of a kernel's work directory over HTTP. Nothing is opened, named or unpacked on this host: the sandbox does it."""

from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse

from gateway.api.dependencies import TheKernel, problems_of
from gateway.api.documents import FileListing, FileWritten
from gateway.errors import (
    BodyTooLarge,
    FileMissing,
    InvalidPath,
    KernelDead,
    KernelGone,
    KernelNotFound,
    NotAFile,
    SandboxDiskFull,
)
from gateway.sandboxes import transfer

router = APIRouter(prefix="/v1/kernels/{kernel_id}/files", tags=["files"])

_TAR = "application/x-tar"
_KINDS = (KernelNotFound, KernelGone, FileMissing, InvalidPath, NotAFile, KernelDead)
_ERRORS = problems_of(*_KINDS)
_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


@router.get("", summary="List the work directory", responses=_ERRORS)
async def list_work_directory(kernel: TheKernel) -> FileListing:
    return await _list(kernel, "")


@router.get(
    "/{path:path}",
    summary="Read a file, list a directory, or pack it as tar",
    response_class=Response,
    responses={
        200: {
            "description": "The file's bytes; for a directory its listing, or a tar of it with Accept: application/x-tar",
            "content": {
                "application/octet-stream": _BYTES,
                _TAR: _BYTES,
                "application/json": {"schema": {"$ref": "#/components/schemas/FileListing"}},
            },
        },
        **_ERRORS,
    },
)
async def read_file(kernel: TheKernel, path: str, accept: Annotated[str, Header()] = "*/*") -> Response:
    link = await kernel.link()
    found = await transfer.ask(link, "stat", path=path)
    if found.get("type") == "directory":
        if _TAR in accept:
            name = (path.strip("/").rpartition("/")[2] or "work") + ".tar"
            return await _stream(transfer.read(link, "pack", path), name, _TAR)
        listing = await _list(kernel, path)
        return Response(listing.model_dump_json(), media_type="application/json")
    if path.endswith("/"):
        raise NotAFile(f"{path} is no directory.")
    return await _stream(transfer.read(link, "read", path), path.rpartition("/")[2], "application/octet-stream")


@router.put(
    "/{path:path}",
    status_code=201,
    summary="Write a file, or unpack a tar into a directory",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/octet-stream": _BYTES, _TAR: _BYTES}},
    },
    responses=problems_of(*_KINDS, BodyTooLarge, SandboxDiskFull),
)
async def write_file(
    kernel: TheKernel, path: str, request: Request, content_type: Annotated[str, Header()] = "application/octet-stream"
) -> FileWritten:
    link = await kernel.link()
    if path == "" or path.endswith("/"):
        if content_type.partition(";")[0].strip() != _TAR:
            raise InvalidPath(
                "A path that ends in / is a directory; send a tar with Content-Type: application/x-tar to fill it."
            )
        await transfer.write(link, "unpack", path, request.stream())
        return FileWritten(path=path, size=None)
    done = await transfer.write(link, "write", path, request.stream())
    size = done.get("size")
    return FileWritten(path=path, size=size if isinstance(size, int) else None)


@router.delete(
    "/{path:path}", status_code=204, summary="Delete a file or a directory with all that is in it", responses=_ERRORS
)
async def delete_file(kernel: TheKernel, path: str) -> None:
    await transfer.ask(await kernel.link(), "delete", path=path)


async def _list(kernel: TheKernel, path: str) -> FileListing:
    found = await transfer.ask(await kernel.link(), "list", path=path)
    return FileListing.model_validate({"path": path.strip("/"), **found})


async def _stream(pieces: AsyncIterator[bytes], name: str, media: str) -> StreamingResponse:
    """Starts the transfer before the status goes out, so that a refusal is still a problem document."""
    await anext(pieces)
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    return StreamingResponse(pieces, media_type=media, headers={"Content-Disposition": disposition})
