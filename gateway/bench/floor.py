"""The floor: jupyter_client speaking ZMQ to the same kernel in the same locked-down container, with no gateway between.

It is what a cell costs at least. The container is made from the gateway's own profile; it differs in two things only, a writable
directory for the kernel's sockets and the kernel itself as the command. Such a directory is a hole in the wall (see
docs/decisions), which is why it exists in this module alone.
"""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import docker
from jupyter_client.blocking.client import BlockingKernelClient

from gateway.sandboxes.base import Limits, SandboxSpec
from gateway.sandboxes.image import ROOT, source_files
from gateway.sandboxes.lockdown import LINK_DIRECTORY, UID, container_body
from gateway.settings import KernelSpecSettings

_TIMEOUT = 60


class FloorKernel:
    """A kernel without a gateway. `start` returns the seconds from the first engine call to the first answer."""

    def __init__(self, spec: KernelSpecSettings, runtime: str = "runc") -> None:
        self._api = docker.APIClient(version="auto")
        self._spec, self._runtime = spec, runtime
        self._name = f"cellgate-bench-{uuid4().hex[:12]}"
        self._directory = Path(tempfile.mkdtemp(prefix="cgb-"))
        self.client = BlockingKernelClient()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        try:
            self._api.remove_container(self._name, force=True)
        except docker.errors.NotFound:
            pass
        self._api.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> float:
        body = self._body()
        begun = time.perf_counter()
        self._api.create_container_from_config(body, self._name)  # type: ignore[no-untyped-call]
        self._api.start(self._name)
        while not all((self._directory / f"k-{port}").exists() for port in range(1, 6)):
            time.sleep(0.002)
        self.client.start_channels(hb=False)
        self._first_answer()
        return time.perf_counter() - begun

    def _first_answer(self) -> None:
        """kernel_info until something has come on shell and on iopub; without the pauses of `wait_for_ready`."""
        self.client.kernel_info()
        self.client.get_shell_msg(timeout=_TIMEOUT)
        self.client.get_iopub_msg(timeout=_TIMEOUT)

    def execute(self, code: str) -> float:
        """Seconds from sending until reply and idle were both seen."""
        begun = time.perf_counter()
        msg_id = self.client.execute(code)
        idle = False
        while not idle:
            message = self.client.get_iopub_msg(timeout=_TIMEOUT)
            idle = (
                message["parent_header"].get("msg_id") == msg_id
                and message["msg_type"] == "status"
                and message["content"]["execution_state"] == "idle"
            )
        while self.client.get_shell_msg(timeout=_TIMEOUT)["parent_header"].get("msg_id") != msg_id:
            pass
        return time.perf_counter() - begun

    def _body(self) -> dict[str, Any]:
        spec, limits = self._spec, self._spec.limits
        seccomp = source_files(ROOT)["kernel-image/seccomp.json"].read_text()
        sandbox = SandboxSpec(
            kernel_id=self._name,
            image=spec.image,
            limits=Limits(limits.memory, limits.cpus, limits.pids),
            work_size=spec.work_size,
            tmp_size=spec.tmp_size,
            shm_size=spec.shm_size,
        )
        body = container_body(
            sandbox, gateway_id="bench", runtime=self._runtime, seccomp=seccomp, link_directory=self._directory
        )
        body["Entrypoint"] = ["/opt/kernel/bin/python", "-m", "cellgate_kernel", "-f", f"{LINK_DIRECTORY}/kernel.json"]
        body["Cmd"] = []
        body["HostConfig"]["Mounts"][0]["ReadOnly"] = False
        self._write_connection_file()
        return body

    def _write_connection_file(self) -> None:
        info: dict[str, Any] = {
            "transport": "ipc",
            "ip": f"{LINK_DIRECTORY}/k",
            **{f"{name}_port": port for port, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)},
            "key": uuid4().hex,
            "signature_scheme": "hmac-sha256",
        }
        (self._directory / "kernel.json").write_text(json.dumps(info))
        os.chown(self._directory, UID, UID)
        os.chown(self._directory / "kernel.json", UID, UID)
        info["ip"] = str(self._directory / "k")
        self.client.load_connection_info(info)  # type: ignore[arg-type]
