"""A gateway that answers from a script, over real HTTP or in memory: what the client and the command line are tested with.

It speaks docs/native-api.md as far as they use it; each cell's events are what `ScriptedGateway.cells` says for its code.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.protocol.outputs import OutputCollector

Script = list[tuple[str, dict[str, Any]]]

TOKEN = "let-me-in"
OK: Script = [("ended", {"status": "ok", "cause": None, "kernel_state": "idle", "variables": "kept", "duration": 0.01})]
UNTIL_INTERRUPT: tuple[str, dict[str, Any]] = ("wait for interrupt", {})
CUT: tuple[str, dict[str, Any]] = ("cut", {})


def ended(status: str, **cause: Any) -> Script:
    members = {"status": status, "cause": cause or None, "kernel_state": "idle", "variables": "kept", "duration": 0.01}
    return [("ended", members)]


def printed(text: str, name: str = "stdout") -> tuple[str, dict[str, Any]]:
    return "stream", {"name": name, "text": text}


def raised(ename: str, evalue: str) -> Script:
    traceback = ["\x1b[0;31m---\x1b[0m", f"\x1b[0;31m{ename}\x1b[0m: {evalue}"]
    return [("error", {"ename": ename, "evalue": evalue, "traceback": traceback}), *ended("error")]


@dataclass
class ScriptedGateway:
    """`cells` maps code to its events after `started`; unknown code ends well and puts nothing out."""

    cells: dict[str, Script] = field(default_factory=dict)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    executed: list[dict[str, Any]] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    """The client's port of each request: equal ports are one connection."""
    delay: float = 0.0
    """Seconds before each answer."""
    interrupts: int = 0
    deaf: bool = False
    """An interrupt is taken and nothing comes of it."""

    def __post_init__(self) -> None:
        self._interrupted = asyncio.Event()
        kernel = "/v1/kernels/{id}"
        self.app = Starlette(
            routes=[
                Route("/v1/kernelspecs", self._specs),
                Route("/v1/kernels", self._list),
                Route("/v1/kernels", self._create, methods=["POST"]),
                Route(kernel, self._get),
                Route(kernel, self._delete, methods=["DELETE"]),
                Route(kernel + "/interrupt", self._interrupt, methods=["POST"]),
                Route(kernel + "/restart", self._get, methods=["POST"]),
                Route(kernel + "/execute", self._execute, methods=["POST"]),
                Route(kernel + "/executions/{eid}/input", self._input, methods=["POST"]),
                Route(kernel + "/files", self._list_files),
                Route(kernel + "/files/{path:path}", self._file, methods=["GET", "PUT", "DELETE"]),
                Route("/broken", lambda request: Response("<h1>Bad Gateway</h1>", 502)),
            ]
        )

    async def _admit(self, request: Request) -> Response | None:
        self.ports.append(request.client.port if request.client else 0)
        await asyncio.sleep(self.delay)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return problem(401, "unauthorized", "The token is wrong.")
        if "id" in request.path_params and request.path_params["id"] not in self.kernels:
            kernel_id = request.path_params["id"]
            return problem(404, "kernel_not_found", f"No kernel has the id {kernel_id!r}.", kernel_id=kernel_id)
        return None

    async def _specs(self, request: Request) -> Response:
        return JSONResponse({"default": "python3", "kernelspecs": [{"name": "python3"}]})

    async def _list(self, request: Request) -> Response:
        return await self._admit(request) or JSONResponse({"kernels": list(self.kernels.values())})

    async def _create(self, request: Request) -> Response:
        if refused := await self._admit(request):
            return refused
        body = orjson.loads(await request.body() or b"{}")
        self.created.append(body)
        if body.get("spec") == "broken":
            return problem(502, "start_failed", "The kernel did not start.", log=["line one", "line two"], retryable=True)
        kernel_id = f"k{len(self.created)}"
        self.kernels[kernel_id] = {"id": kernel_id, "spec": "python3", "state": "idle", "label": body.get("label")}
        return JSONResponse(self.kernels[kernel_id], 201)

    async def _get(self, request: Request) -> Response:
        return await self._admit(request) or JSONResponse(self.kernels[request.path_params["id"]])

    async def _delete(self, request: Request) -> Response:
        if refused := await self._admit(request):
            return refused
        del self.kernels[request.path_params["id"]]
        return Response(status_code=204)

    async def _interrupt(self, request: Request) -> Response:
        self.interrupts += 1
        if not self.deaf:
            self._interrupted.set()
        return await self._admit(request) or JSONResponse({"execution_id": "e1"}, 202)

    async def _input(self, request: Request) -> Response:
        self.answers.append((await request.json())["value"])
        self._interrupted.set()
        return Response(status_code=204)

    async def _execute(self, request: Request) -> Response:
        if refused := await self._admit(request):
            return refused
        body = await request.json()
        self.executed.append(body)
        if request.headers["accept"] == "application/x-ndjson":
            return StreamingResponse(self._lines(body), media_type="application/x-ndjson")
        collector = OutputCollector()
        last: dict[str, Any] = {}
        async for last in self._events(body):
            collector.add_members(last["type"], last)
        names = ("status", "cause", "execution_count", "kernel_state", "variables", "duration")
        found = {"execution_id": last["execution_id"], "kernel_id": request.path_params["id"], "outputs": collector.finish()}
        return JSONResponse(found | {name: last.get(name) for name in names})

    async def _lines(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in self._events(body):
            yield orjson.dumps(event) + b"\n"

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        count = len(self.executed)
        script: Script = [("queued", {"position": 0}), ("started", {"execution_count": count})]
        script += self.cells.get(body["code"], OK)
        self._interrupted.clear()
        for seq, (kind, members) in enumerate(script, 1):
            if kind == "wait for interrupt":
                await self._interrupted.wait()
                continue
            if kind == "cut":
                return
            await asyncio.sleep(self.delay)
            start = {"seq": seq, "type": kind, "time": f"2026-11-30T16:00:{seq:02}.000000Z", "execution_id": f"e{count}"}
            last = {"execution_count": count} if kind == "ended" else {}
            yield start | last | members

    async def _list_files(self, request: Request) -> Response:
        entries = [{"path": path, "name": path, "type": "file", "size": len(data)} for path, data in self.files.items()]
        return await self._admit(request) or JSONResponse({"path": "", "entries": entries})

    async def _file(self, request: Request) -> Response:
        if refused := await self._admit(request):
            return refused
        path = request.path_params["path"]
        if request.method == "PUT":
            self.files[path] = await request.body()
            return JSONResponse({"path": path, "size": len(self.files[path])}, 201)
        if path.endswith("dir"):
            return await self._list_files(request)
        if path not in self.files:
            return problem(404, "file_not_found", f"There is no file {path!r}.")
        if request.method == "DELETE":
            del self.files[path]
            return Response(status_code=204)
        return Response(self.files[path], headers={"content-disposition": "attachment"})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Over real HTTP on a free port of this machine; yields the URL."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            self._interrupted.set()
            server.should_exit = True
            thread.join(10)


def problem(status: int, code: str, detail: str, **members: Any) -> Response:
    body = {"type": f"urn:cellgate:error:{code}", "title": "No", "status": status, "code": code, "detail": detail}
    return JSONResponse(body | {"retryable": False} | members, status, media_type="application/problem+json")
