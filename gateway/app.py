"""The composition root: the one module that knows every room, and ties them together for one Settings.

`create_app` gives the ASGI application (its lifespan owns engine, manager and all kernels); `serve` runs it until a signal;
`serving` runs it in a thread for as long as a block lasts.
"""

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import anyio.abc
import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp

from gateway import __version__, telemetry
from gateway.api import (
    execute,
    executions,
    files,
    health,
    jupyter_kernels,
    jupyter_metrics,
    jupyter_server,
    jupyter_sessions,
    jupyter_specs,
    native,
    problems,
    socket,
)
from gateway.api.auth import TokenCheck, check_bind, load_token
from gateway.api.guard import Guard
from gateway.api.wire import BoundedHttpProtocol
from gateway.errors import ConfigurationError, EngineUnavailable, StoreFenced
from gateway.kernels.log import timestamp
from gateway.kernels.manager import KernelManager
from gateway.kernels.sessions import Sessions
from gateway.sandboxes.base import SandboxEngine
from gateway.sandboxes.docker import DockerEngine
from gateway.settings import Settings
from gateway.store.base import Store
from gateway.store.lock import Lease
from gateway.store.memory import MemoryStore
from gateway.store.sqlite import SqliteStore

log = structlog.get_logger()

DESCRIPTION = "Stateful Jupyter kernels in locked-down sandboxes. Conventions, events and errors: docs/native-api.md."


def create_app(settings: Settings, engine: SandboxEngine | None = None) -> FastAPI:
    """The application; `engine` None means Docker as the settings say."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                store = await _store(settings, stack)
                chosen = engine or DockerEngine(settings, gateway_id(settings.state_dir))
                stack.push_async_callback(chosen.aclose)
                memory = await _ready(chosen, bool(await store.kernels()))
                manager = app.state.manager = KernelManager(settings, chosen, memory, store)
                app.state.sessions = Sessions(manager, settings.state_dir / "sessions.json" if store.durable else None)
                app.state.started = timestamp()
                app.state.metrics.watch(manager, app.state.started)
                tasks = await stack.enter_async_context(anyio.create_task_group())
                await tasks.start(_run_manager, manager, app)
            except Exception as error:
                # What uvicorn makes of it is an exit without a word.
                app.state.error = error
                raise
            try:
                yield
            finally:
                with anyio.move_on_after(settings.kernels.shutdown_timeout, shield=True):
                    await _leave(manager, settings)
                tasks.cancel_scope.cancel()

    app = FastAPI(
        title="Cellgate",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        root_path_in_servers=False,
    )
    app.state.settings, app.state.metrics = settings, jupyter_metrics.Metrics()
    for room in (health, native, execute, executions, files, socket):
        app.include_router(room.router)
    for room in (jupyter_server, jupyter_specs, jupyter_kernels, jupyter_sessions, jupyter_metrics):
        app.include_router(room.router)
    problems.install(app)
    app.openapi = lambda: _openapi(app, settings.server.base_url)  # type: ignore[method-assign]
    return app


def guarded(app: FastAPI, settings: Settings) -> ASGIApp:
    """The app behind its one door; raises `ConfigurationError`."""
    check_bind(settings)
    if settings.auth == "none":
        log.warning("no_token_needed", text="Anyone on this machine who reaches the port may run code.")
        return Guard(app, settings.server, lambda _header: True, app.state.metrics.observe)
    return Guard(app, settings.server, TokenCheck(load_token(settings).value), app.state.metrics.observe)


async def _run_manager(manager: KernelManager, app: FastAPI, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    """A fault of the manager itself ends the process: a gateway without one could only tell untruths, and the next one finds all
    that was recorded."""
    try:
        await manager.run(task_status=task_status)
    except Exception as error:
        app.state.error = cause = _only(error)
        if not manager.running:
            raise cause from error
        log.exception("gateway_failed")
        manager.over.set()


def _only(error: Exception) -> Exception:
    """What a group of one is about: the operator is told the reason, not how it came."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _store(settings: Settings, stack: contextlib.AsyncExitStack) -> Store:
    """The opened store of the state directory, which is ours alone until the stack ends; raises `ConfigurationError`."""
    lease = await Lease.acquire(settings.state_dir, settings.store.lock_wait)
    stack.callback(lease.release)
    if settings.store.kind == "memory":
        return MemoryStore()
    store = SqliteStore(settings.store.path or settings.state_dir / "store.sqlite3")
    await store.open()
    stack.push_async_callback(store.aclose)
    return store


async def _ready(engine: SandboxEngine, has_kernels: bool) -> int:
    """Bytes of memory that the engine's machine has. Refuses to start where no kernel could be started, with all reasons at once;
    but kernels that are there already are taken up even while the engine does not answer."""
    try:
        report = await engine.check()
    except EngineUnavailable as error:
        if not has_kernels:
            raise
        log.error("engine_unavailable", reason=error.detail)
        return 0
    if report.problems:
        text = " ".join(f"{finding.subject}: {finding.text} {finding.remedy}" for finding in report.problems)
        raise ConfigurationError(f"The {report.engine} engine can't run kernels. {text}")
    for finding in report.findings:
        if finding.level == "warning":
            log.warning("engine_warning", subject=finding.subject, text=f"{finding.text} {finding.remedy}")
    return report.memory


async def _leave(manager: KernelManager, settings: Settings) -> None:
    """What becomes of the kernels when the gateway ends."""
    if settings.server.on_shutdown == "stop" and not manager.over.is_set():
        await manager.stop_all()
    else:
        await manager.detach_all()


def gateway_id(state_dir: Path) -> str:
    """The identity that sandboxes are labelled with: made once per state directory."""
    path = state_dir / "gateway-id"
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(str(uuid4()))
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"The state directory {state_dir} can't be used ({error.strerror}).") from None


def _openapi(app: FastAPI, base_url: str) -> dict[str, Any]:
    """FastAPI's document, plus what it can't see: the bearer token and the events of streamed answers."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = document.setdefault("components", {})
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for model in execute.EXTRA_SCHEMAS:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components["schemas"].setdefault(model.__name__, schema)
        document["security"] = [{"token": []}]
        if base_url != "/":
            document["servers"] = [{"url": base_url.rstrip("/")}]
        app.openapi_schema = document
    return app.openapi_schema


class _Server(uvicorn.Server):
    """Uvicorn's server that says where it listens once it does, and lets cells end before it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._app, self._settings, self._on_ready = app, settings, on_ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = self.config.host
            base = self._settings.server.base_url.rstrip("/")
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}{base}")

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Cells first, then connections: whoever waits for a cell reads its end."""
        manager: KernelManager = self._app.state.manager
        if not self.force_exit:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_force, tasks.cancel_scope)
                await manager.drain(self._settings.server.drain_timeout)
                tasks.cancel_scope.cancel()
        with anyio.move_on_after(self._settings.kernels.shutdown_timeout):
            await _leave(manager, self._settings)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A second signal, of whatever kind, waits for nobody."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        """Ends also when the manager can't go on, as when another gateway has taken over."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_manager)
            await super().main_loop()
            tasks.cancel_scope.cancel()

    async def _watch_manager(self) -> None:
        manager: KernelManager = self._app.state.manager
        await manager.over.wait()
        if manager.fenced:
            self._app.state.error = StoreFenced("Another gateway has taken over the state directory; this one has stopped.")
        self.should_exit = self.force_exit = True

    async def _watch_force(self, scope: anyio.CancelScope) -> None:
        while not self.force_exit:  # noqa: ASYNC110 - set by a signal handler, which may not touch the loop
            await anyio.sleep(0.1)
        scope.cancel()


def _server(app: FastAPI, settings: Settings, on_ready: Callable[[str], None]) -> _Server:
    options = settings.server
    config = uvicorn.Config(
        guarded(app, settings),
        host=options.host,
        port=options.port,
        http=BoundedHttpProtocol,
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws_max_size=options.ws_max_message,
        ws_ping_interval=options.ws_ping_interval,
        ws_ping_timeout=options.ws_ping_interval,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=int(options.shutdown_grace),
    )
    return _Server(config, app, settings, on_ready)


def serve(settings: Settings, on_ready: Callable[[str], None]) -> None:
    """Runs until SIGINT or SIGTERM; `on_ready` gets the URL. Raises `GatewayError` when it can't start."""
    telemetry.configure(settings.log_level, settings.log_format)
    _run(settings, on_ready, lambda _server: None)


def _run(settings: Settings, on_ready: Callable[[str], None], on_server: Callable[[_Server], None]) -> None:
    app = create_app(settings)
    server = _server(app, settings, on_ready)
    on_server(server)
    stopped = False
    try:
        server.run()
    except SystemExit:
        stopped = True
    error = getattr(app.state, "error", None)
    if error is not None:
        raise error
    if stopped:
        raise ConfigurationError(
            f"The gateway can't listen on {settings.server.host}:{settings.server.port}. Is another one running? Choose another --port."
        )


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """A gateway in a thread of this process; yields its URL, and stops it at the end. Raises what `serve` raises."""
    telemetry.configure(settings.log_level, settings.log_format)
    # Its kernels are the block's: nobody comes after it.
    settings = settings.model_copy(update={"server": settings.server.model_copy(update={"on_shutdown": "stop"})})
    ready = threading.Event()
    found: dict[str, Any] = {}

    def on_ready(url: str) -> None:
        found["url"] = url
        ready.set()

    def run() -> None:
        try:
            _run(settings, on_ready, lambda server: found.update(server=server))
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits for the thread
            found["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="gateway", daemon=True)
    thread.start()
    try:
        ready.wait()
        if "url" not in found:
            raise found.get("error") or ConfigurationError("The gateway ended before it was ready.")
        yield found["url"]
    finally:
        if "server" in found:
            found["server"].should_exit = True
        thread.join(settings.kernels.shutdown_timeout + settings.server.shutdown_grace + 5)
