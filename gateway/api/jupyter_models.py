"""Kernels, sessions and kernelspecs as Jupyter's clients know them. What is ours alone is under the one key ``cellgate``."""

from typing import Any

from gateway.kernels.kernel import Kernel
from gateway.kernels.log import rfc3339
from gateway.kernels.sessions import Session
from gateway.kernels.state import KernelState
from gateway.settings import KernelSpecSettings

S = KernelState
EXECUTION_STATES: dict[KernelState, str] = {
    S.REQUESTED: "starting",
    S.STARTING: "starting",
    S.RECOVERING: "starting",
    S.IDLE: "idle",
    S.BUSY: "busy",
    S.INTERRUPTING: "busy",
    S.RESTARTING: "restarting",
    S.STOPPING: "terminating",
    S.DEAD: "dead",
}
"""In the words of https://jupyterlab.readthedocs.io/en/stable/api/modules/services.Kernel.html."""
LOGOS = {"logo-32x32": "logo-32x32.png", "logo-64x64": "logo-64x64.png", "logo-svg": "logo-svg.svg"}
"""Resource -> file, in `gateway/api/logos`."""


def kernel_model(kernel: Kernel) -> dict[str, Any]:
    return {
        "id": kernel.id,
        "name": kernel.request.spec_name,
        "last_activity": kernel.last_activity,
        "execution_state": EXECUTION_STATES[kernel.state],
        "connections": kernel.connections,
        "cellgate": {
            "state": kernel.state.value,
            "label": kernel.request.label,
            "username": kernel.request.env.get("KERNEL_USERNAME", ""),
            "expires_at": rfc3339(kernel.expires_at.timestamp()),
            "cause": kernel.cause,
        },
    }


def session_model(session: Session, kernel: Kernel) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": session.id,
        "path": session.path,
        "name": session.name,
        "type": session.type,
        "kernel": kernel_model(kernel),
    }
    if session.type == "notebook":
        model["notebook"] = {"path": session.path, "name": session.name}
    return model


def spec_model(name: str, spec: KernelSpecSettings, base: str) -> dict[str, Any]:
    """`base` is the base URL without its last slash. What runs in the sandbox is the image's affair, so `argv` only shows the kind."""
    argv = ["python", "-m", "ipykernel_launcher"] if spec.language == "python" else [spec.kernelspec]
    return {
        "name": name,
        "spec": {
            "argv": [*argv, "-f", "{connection_file}"],
            "env": {},
            "display_name": spec.display_name,
            "language": spec.language,
            "interrupt_mode": "signal",
            "metadata": {"debugger": spec.language == "python"},
        },
        "resources": {resource: f"{base}/kernelspecs/{name}/{file}" for resource, file in LOGOS.items()},
    }
