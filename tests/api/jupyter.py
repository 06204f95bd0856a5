"""What the tests of Jupyter's API share: a gateway over scripted kernels, and how that API tells an error."""

import json
from typing import Any

import httpx2

from tests.api.scripted import ScriptedGateway
from tests.support import _OF_THIS_MACHINE

NOBODY = "00000000-0000-4000-8000-000000000000"
MODEL = {"id", "name", "last_activity", "execution_state", "connections", "cellgate"}


def refused(answer: httpx2.Response, status: int, words: str = "") -> dict[str, Any]:
    """Checks that an answer is an error with this status, as Jupyter's clients read it, and hands it back."""
    assert (answer.status_code, answer.headers.get("content-type")) == (status, "application/json"), answer.text
    document: dict[str, Any] = answer.json()
    assert isinstance(document["message"], str)
    assert document["message"]
    assert isinstance(document["reason"], str)
    assert set(document) <= {"message", "reason", "short_message", "cellgate"}
    assert words in document["message"], document
    told = json.dumps({name: value for name, value in document.items() if name != "cellgate"})
    assert not [word for word in (*_OF_THIS_MACHINE, "Traceback", ".py", "<html", "/v1/") if word in told], told
    return document


def start(gateway: ScriptedGateway, **body: Any) -> dict[str, Any]:
    answer = gateway.http.post("/api/kernels", json=body)
    assert answer.status_code == 201, answer.text
    model: dict[str, Any] = answer.json()
    return model


def env_of(gateway: ScriptedGateway, kernel_id: str) -> dict[str, str]:
    """The variables that the kernel process was given."""
    return gateway.engine.boxes[kernel_id].inside.supervisor.env


def clear(gateway: ScriptedGateway) -> None:
    for kernel in gateway.http.get("/api/kernels").json():
        gateway.http.delete(f"/api/kernels/{kernel['id']}")
