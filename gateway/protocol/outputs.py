"""From Jupyter messages to events, and from events to notebook outputs: pure functions and one small collector.

`to_payload` follows https://jupyter-client.readthedocs.io/en/stable/messaging.html (section "Messages on the IOPub channel");
`OutputCollector` follows the rules a notebook applies: stream texts of one name join, ``clear_output(wait=True)`` acts at the
next output, ``update_display_data`` changes every output that carries the same display_id.
"""

from collections.abc import Callable
from typing import Any

from gateway.protocol.events import Event, Payload
from gateway.protocol.messages import BadMessage, marks

Bundle = dict[str, Any]
_OBJECT = 64
"""Bytes of a small object with its place in a list."""


def to_payload(msg_type: str, content: dict[str, Any]) -> Payload | None:
    """An IOPub or stdin message -> payload, or None for types that are no output; raises `BadMessage` on wrong shapes."""
    build = _BUILDERS.get(msg_type)
    return build(content) if build else None


def is_output(msg_type: str) -> bool:
    return msg_type in _BUILDERS


def weight(payload: Payload, raw: bytes) -> int:
    """Bytes that an output costs, `raw` being its content as JSON: text its length, other values what they take as objects."""
    bundles = [payload.members.get(key) or {} for key in ("data", "metadata")]
    if payload.type != "error" and all(isinstance(value, str) for bundle in bundles for value in bundle.values()):
        return len(raw)
    return len(raw) + _OBJECT * marks(raw)


def _text(content: dict[str, Any], key: str, default: str = "") -> str:
    value = content.get(key, default)
    if not isinstance(value, str):
        raise BadMessage(f"{key} is not text")
    return value


def _mapping(content: dict[str, Any], key: str) -> Bundle:
    value = content.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadMessage(f"{key} is not an object")
    return value


def _count(content: dict[str, Any]) -> int | None:
    value = content.get("execution_count")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _display_id(content: dict[str, Any]) -> str | None:
    value = _mapping(content, "transient").get("display_id")
    return value if isinstance(value, str) else None


def _stream(content: dict[str, Any]) -> Payload:
    name = _text(content, "name", "stdout")
    return Payload("stream", {"name": name if name == "stderr" else "stdout", "text": _text(content, "text")})


def _display(content: dict[str, Any]) -> Payload:
    return Payload(
        "display",
        {
            "data": _mapping(content, "data"),
            "metadata": _mapping(content, "metadata"),
            "display_id": _display_id(content),
        },
    )


def _update(content: dict[str, Any]) -> Payload:
    return Payload("update_display", _display(content).members)


def _result(content: dict[str, Any]) -> Payload:
    return Payload(
        "result",
        {
            "data": _mapping(content, "data"),
            "metadata": _mapping(content, "metadata"),
            "execution_count": _count(content),
        },
    )


def _error(content: dict[str, Any]) -> Payload:
    lines = content.get("traceback")
    if not isinstance(lines, list):
        raise BadMessage("traceback is not a list")
    return Payload(
        "error",
        {
            "ename": _text(content, "ename"),
            "evalue": _text(content, "evalue"),
            "traceback": [line for line in lines if isinstance(line, str)],
        },
    )


def _clear(content: dict[str, Any]) -> Payload:
    return Payload("clear_output", {"wait": content.get("wait") is True})


def _input(content: dict[str, Any]) -> Payload:
    return Payload("input_request", {"prompt": _text(content, "prompt"), "password": content.get("password") is True})


_BUILDERS: dict[str, Callable[[dict[str, Any]], Payload]] = {
    "stream": _stream,
    "display_data": _display,
    "update_display_data": _update,
    "execute_result": _result,
    "error": _error,
    "clear_output": _clear,
    "input_request": _input,
}


class OutputCollector:
    """Builds the nbformat 4 outputs of one cell from its events, in the order in which they came.

    `displays` maps a display_id to the outputs that carry it. Collectors of one notebook share it, since a cell may update
    what an earlier one has displayed.
    """

    def __init__(self, displays: dict[str, list[Bundle]] | None = None) -> None:
        self.outputs: list[Bundle] = []
        self._displays: dict[str, list[Bundle]] = {} if displays is None else displays
        self._texts: list[str] = []
        self._clear_pending = False

    def add(self, event: Event) -> None:
        self.add_members(event.type, event.members)

    def add_members(self, kind: str, members: dict[str, Any]) -> None:
        if kind == "clear_output":
            self._clear_pending = members["wait"]
            if not members["wait"]:
                self._clear()
        elif kind == "update_display":
            self._update(members)
        elif kind in ("stream", "display", "result", "error"):
            if self._clear_pending:
                self._clear_pending = False
                self._clear()
            self._append(kind, members)

    def finish(self) -> list[Bundle]:
        """The outputs so far, with stream texts joined; may be called again after more events."""
        self._join_texts()
        return self.outputs

    def _append(self, kind: str, members: dict[str, Any]) -> None:
        if kind == "stream":
            last = self.outputs[-1] if self.outputs else None
            if last and last["output_type"] == "stream" and last["name"] == members["name"]:
                self._texts.append(members["text"])
                return
            self._join_texts()
            self._texts = [members["text"]]
            self.outputs.append({"output_type": "stream", "name": members["name"], "text": ""})
            return
        self._join_texts()
        if kind == "error":
            self.outputs.append({"output_type": "error", **members})
            return
        output: Bundle = {"data": members["data"], "metadata": members["metadata"]}
        if kind == "result":
            output |= {"output_type": "execute_result", "execution_count": members["execution_count"]}
        else:
            output["output_type"] = "display_data"
            if members.get("display_id"):
                self._displays.setdefault(members["display_id"], []).append(output)
        self.outputs.append(output)

    def _update(self, members: dict[str, Any]) -> None:
        for output in self._displays.get(members["display_id"] or "", []):
            output["data"] = members["data"]
            output["metadata"] = members["metadata"]

    def _join_texts(self) -> None:
        """Stream texts are kept apart until somebody looks: joining at each event would be quadratic."""
        if self._texts:
            last = self.outputs[-1]
            last["text"] += "".join(self._texts)
            self._texts = []

    def _clear(self) -> None:
        self._texts = []
        gone = {id(output) for output in self.outputs}
        for outputs in self._displays.values():
            outputs[:] = [output for output in outputs if id(output) not in gone]
        self.outputs.clear()
