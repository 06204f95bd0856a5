"""The gateway under measurement: a process of its own, as users run it, and a client that adds as little as it can."""

import asyncio
import multiprocessing
import shutil
import tempfile
import time
from typing import Any, Self

import httpx2
import orjson
import websockets

from gateway.settings import Settings, load

_START = 60.0


def _serve(settings: Settings, ready: Any) -> None:
    from gateway.app import serve

    serve(settings, ready.put)


class Subject:
    """Starts `serve` in a child process on a free loopback port."""

    def __init__(self, server: dict[str, Any] | None = None, **overrides: Any) -> None:
        self._directory = tempfile.mkdtemp(prefix="cgb-", dir="/tmp")
        self._overrides = {
            "state_dir": self._directory,
            "token": "benchmark-" + "x" * 16,
            "log_level": "error",
            **overrides,
        }
        self._server: dict[str, Any] = {"on_shutdown": "stop", **(server or {})}
        self.url = ""
        self.start()
        self.headers = {"Authorization": f"Bearer {self.settings.token}"}
        self.http = httpx2.Client(base_url=self.url, headers=self.headers, timeout=_START)

    def start(self) -> None:
        """On the same state directory, and on the same port as before."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.settings = load(**self._overrides, server={**self._server, "port": port})
        spawn = multiprocessing.get_context("spawn")
        ready: Any = spawn.Queue()
        self._process = spawn.Process(target=_serve, args=(self.settings, ready), daemon=True)
        self._process.start()
        self.url = ready.get(timeout=_START)

    def kill(self) -> None:
        """SIGKILL: no word, no tidying up."""
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM, and waits until the process has ended."""
        self._process.terminate()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._process.terminate()
        self._process.join(20)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the gateway's process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.join(_START)
        if self._process.is_alive():
            raise TimeoutError("the gateway did not stop")

    def create(self) -> tuple[str, float]:
        """A new kernel's id, and the seconds until it had answered."""
        begun = time.perf_counter()
        answer = self.http.post("/v1/kernels", json={})
        duration = time.perf_counter() - begun
        answer.raise_for_status()
        return answer.json()["id"], duration

    def delete(self, kernel_id: str) -> None:
        self.http.delete(f"/v1/kernels/{kernel_id}").raise_for_status()

    def execute_http(self, kernel_id: str, code: str) -> float:
        begun = time.perf_counter()
        answer = self.http.post(f"/v1/kernels/{kernel_id}/execute", json={"code": code})
        duration = time.perf_counter() - begun
        if answer.json()["status"] != "ok":
            raise RuntimeError(answer.text)
        return duration


class SubjectSocket:
    """One native WebSocket, driven from synchronous code by a loop of its own so that both sides alternate cell by cell."""

    def __init__(self, subject: Subject, kernel_id: str) -> None:
        self._loop = asyncio.new_event_loop()
        url = f"{subject.url.replace('http', 'ws', 1)}/v1/kernels/{kernel_id}/ws"
        connect = websockets.connect(url, additional_headers=subject.headers, max_size=None, compression=None)
        self._socket = self._loop.run_until_complete(connect.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._socket.close())
        self._loop.close()

    def execute(self, code: str) -> float:
        """Seconds from sending until `ended` had arrived."""
        return self._loop.run_until_complete(self._execute(code))

    async def _execute(self, code: str) -> float:
        begun = time.perf_counter()
        await self._socket.send(orjson.dumps({"op": "execute", "code": code}).decode())
        while True:
            event = orjson.loads(await self._socket.recv())
            if event["type"] == "ended":
                duration = time.perf_counter() - begun
                if event["status"] != "ok":
                    raise RuntimeError(str(event))
                return duration
