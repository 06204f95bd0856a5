"""Values of a MIME bundle as bytes and as references; and MIME names as a hostile kernel would choose them."""

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.events import Event, EventType
from gateway.protocol.large import LIMIT, content, referenced

PREFIX = "/v1/kernels/k/executions/e/events"
PIXELS = bytes(range(256)) * 10


def event(data: Any, kind: EventType = "display", **members: Any) -> Event:
    return Event(7, kind, "2026-11-30T16:00:00.000000Z", "e", {"data": data, "metadata": {}, "display_id": None, **members})


@pytest.mark.parametrize(
    "mime", ["image/png", "IMAGE/PNG", "image/jpeg", "image/gif", "application/pdf", "audio/wav", "video/mp4"]
)
@pytest.mark.parametrize("spelling", [base64.b64encode, base64.encodebytes])
def test_binary_types_are_decoded(mime: str, spelling: Any) -> None:
    assert content(mime, spelling(PIXELS).decode()) == (PIXELS, mime)


@pytest.mark.parametrize(
    "mime", ["text/plain", "text/html", "image/svg+xml", "application/javascript", "text/latex", "audio/x+xml"]
)
def test_text_is_utf8(mime: str) -> None:
    assert content(mime, "é ✓ 🎉") == ("é ✓ 🎉".encode(), mime)


@pytest.mark.parametrize(
    "mime", ["application/json", "application/geo+json", "application/vnd.vegalite.v5+json", "image/x+json"]
)
@pytest.mark.parametrize("value", [{"a": [1, None]}, [1], "text", 1.5, None, True])
def test_json_types_are_json(mime: str, value: Any) -> None:
    body, media = content(mime, value)
    assert (orjson.loads(body), media) == (value, mime)


@pytest.mark.parametrize("value", [{"a": 1}, [1], 7, None])
def test_what_is_no_text_under_a_type_of_text_is_json(value: Any) -> None:
    for mime in ("text/plain", "image/png", "a/b", "nonsense"):
        body, media = content(mime, value)
        assert (orjson.loads(body), media) == (value, "application/json")


@pytest.mark.parametrize("value", ["not base64!", "é", "YQ", "====", "<svg/>"])
def test_a_picture_that_is_none_is_bytes_of_no_type(value: str) -> None:
    assert content("image/png", value) == (value.encode(), "application/octet-stream")


HOSTILE = [
    "",
    "text",
    "/",
    "text/",
    "/plain",
    "text/plain\r\nSet-Cookie: a=b",
    "text/plain\n",
    "text/html;charset=utf-7",
    'text/html; a="b',
    "text/ plain",
    " text/plain",
    "text/plain\0",
    "tëxt/plain",
    "text/plain/x",
    "x" * 200 + "/y",
    "../../etc/passwd",
    '"><script>',
    "multipart/form-data; boundary=x",
]


@pytest.mark.parametrize("mime", HOSTILE)
def test_a_name_that_is_no_media_type_does_not_become_one(mime: str) -> None:
    assert content(mime, "x") == (b"x", "application/octet-stream")


@given(st.text(), st.text())
def test_a_media_type_is_always_fit_for_a_header(mime: str, value: str) -> None:
    _, media = content(mime, value)
    media.encode("ascii")
    assert not set(media) & set(" ;,\r\n\0\"'")
    assert media.count("/") == 1


# references


def test_a_small_event_stays_as_it_is() -> None:
    small = event({"text/plain": "x" * 1000})
    assert referenced(small, PREFIX) is small.json


def test_many_small_values_stay_where_they_are() -> None:
    many = event({f"text/x-{number}": "x" * 10_000 for number in range(10)})
    assert referenced(many, PREFIX) == many.json


def test_an_event_without_a_bundle_stays_whatever_its_size() -> None:
    text = Event(1, "stream", "t", "e", {"name": "stdout", "text": "x" * 200_000})
    assert referenced(text, PREFIX) is text.json
    odd = Event(1, "display", "t", "e", {"data": None, "text": "x" * 200_000})
    assert referenced(odd, PREFIX) is odd.json


def test_large_values_are_left_out_and_named() -> None:
    picture = base64.b64encode(PIXELS * 100).decode()
    table = {"rows": list(range(50_000))}
    shown = event({"text/plain": "small", "image/png": picture, "application/json": table, "text/x": "é" * 40_000}, "result")
    found = orjson.loads(referenced(shown, PREFIX))
    assert {key: found[key] for key in ("seq", "type", "time", "execution_id", "metadata")} == {
        "seq": 7,
        "type": "result",
        "time": "2026-11-30T16:00:00.000000Z",
        "execution_id": "e",
        "metadata": {},
    }
    assert found["data"] == {"text/plain": "small"}
    assert found["references"] == {
        "image/png": {"size": len(PIXELS) * 100, "url": f"{PREFIX}/7/data?type=image%2Fpng"},
        "application/json": {"size": len(orjson.dumps(table)), "url": f"{PREFIX}/7/data?type=application%2Fjson"},
        "text/x": {"size": 80_000, "url": f"{PREFIX}/7/data?type=text%2Fx"},
    }
    assert shown.members["data"]["image/png"] == picture


@pytest.mark.parametrize(("size", "left"), [(LIMIT, True), (LIMIT + 1, False)])
def test_the_limit_is_exact(size: int, left: bool) -> None:
    found = orjson.loads(referenced(event({"text/plain": "x" * size}), PREFIX))
    assert ("text/plain" in found["data"]) is left
    assert ("references" in found) is not left


@pytest.mark.parametrize("mime", HOSTILE)
def test_a_reference_quotes_whatever_name_there_is(mime: str) -> None:
    found = orjson.loads(referenced(event({mime: "x" * 70_000}), PREFIX))
    url = found["references"][mime]["url"]
    assert url.startswith(f"{PREFIX}/7/data?type=")
    assert not set(url.removeprefix(PREFIX).removeprefix("/7/data?type=")) & set(' &?#/"<>\r\n')
