"""Jupyter messages from hostile code: whatever bytes come, the answer is a value that can be said again, or `BadMessage`."""

import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from gateway.protocol import messages
from gateway.protocol.messages import DELIMITER, MAX_DEPTH, BadMessage, clean_text, decode_json, decode_object, split

PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(st.characters(categories=["Cs"]), max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=15,
)


def say_again(value: Any) -> bytes:
    """As the encoder of events does, with room for the levels that an event or a notebook adds."""
    for _ in range(10):
        value = {"value": [value]}
    return orjson.dumps(value)


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    try:
        value = decode_json(raw)
    except BadMessage:
        return
    say_again(value)


@given(PYTHON_VALUES, st.booleans())
def test_whatever_python_can_encode_comes_through(value: Any, ascii_only: bool) -> None:
    """A kernel's own encoder lets NaN, lone surrogates and integers of any size through."""
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    say_again(decode_json(raw))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        max_leaves=15,
    )
)
def test_plain_json_comes_through_unchanged(value: Any) -> None:
    assert decode_json(orjson.dumps(value)) == value
    assert decode_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=30), st.integers(0, 200), st.binary(max_size=3))
def test_changed_json(noise: bytes, position: int, cut: bytes) -> None:
    raw = json.dumps({"data": {"text/plain": "value", "n": [1, 2.5, None, True, "\ud83d\ude00"]}}).encode()
    position %= len(raw)
    changed = raw[:position] + noise + raw[position + len(cut) :]
    try:
        value = decode_json(changed)
    except BadMessage:
        return
    say_again(value)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"NaN", None),
        (b"Infinity", None),
        (b"-Infinity", None),
        (b"[1, NaN, 2]", [1, None, 2]),
        (b"1e400", None),
        (b"-1e400", None),
        (b"[1e400, 1.5]", [None, 1.5]),
        (b'"\\ud800"', "\ufffd"),
        (b'"a\\udfffb"', "a\ufffdb"),
        (b'"\\ude00\\ud83d"', "\ufffd\ufffd"),
        (b'"\\ud83d\\ude00"', "😀"),
        (b'["\\ud83d\\ude00", "\\ud83d"]', ["😀", "\ufffd"]),
        (b'{"\\ud800": "\\udc00"}', {"\ufffd": "\ufffd"}),
        (b'"caf\xe9"', "caf\ufffd"),
        (b'"\xed\xa0\x80"', "\ufffd\ufffd\ufffd"),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"18446744073709551615", 2**64 - 1),
        (b"[NaN, 18446744073709551615]", [None, 2**64 - 1]),
        (b"[NaN, 18446744073709551616]", [None, "18446744073709551616"]),
        (b"[NaN, -9223372036854775809]", [None, "-9223372036854775809"]),
        (b"[NaN, " + b"9" * 5000 + b"]", [None, "9" * 5000]),
        (b' {"a" : 1} ', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'"\\u0000"', "\0"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_json_does_not_allow_is_replaced(raw: bytes, expected: object) -> None:
    assert decode_json(raw) == expected
    say_again(decode_json(raw))


@pytest.mark.parametrize("digits", [b"18446744073709551616", b"123456789012345678901234567890", b"-" + b"9" * 400])
def test_an_integer_beyond_64_bits_becomes_something_that_can_be_said(digits: bytes) -> None:
    value = decode_json(digits)
    assert value is None or str(value).lstrip("-")[0] in "123456789"
    say_again(value)


@pytest.mark.parametrize(
    "raw",
    [b"", b" ", b"{", b"[1,", b"nul", b"'a'", b"{a: 1}", b"\xff\xfe\xfd", b"\0", b'"\n"', b"1 2", b"\xef\xbb\xbf{}"],
    ids=repr,
)
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_json(raw)


def nested(depth: int, kind: str, lenient: bool) -> bytes:
    """`lenient` puts a NaN inside, so that the second decoder gets it."""
    inner = b"NaN" if lenient else b"1"
    if kind == "list":
        return b"[" * depth + inner + b"]" * depth
    return b'{"a":' * depth + inner + b"}" * depth


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_nesting_is_bounded(kind: str, lenient: bool) -> None:
    for depth in (1, 50, MAX_DEPTH - 1, MAX_DEPTH):
        say_again(decode_json(nested(depth, kind, lenient)))
    for depth in (MAX_DEPTH + 1, 253, 254, 255, 500, 1024, 1025, 5000, 100_000):
        with pytest.raises(BadMessage):
            decode_json(nested(depth, kind, lenient))


def test_many_brackets_side_by_side_are_not_deep() -> None:
    raw = b"[" + b"[],{}," * 10_000 + b"0]"
    assert len(decode_json(raw)) == 20_001
    assert len(decode_json(b'{"a": "' + b"[" * 10_000 + b'"}')["a"]) == 10_000


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1,", b'"x",', b"NaN,"])
def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch, unit: bytes) -> None:
    """Small values take many times the bytes of their text, so a bound on bytes alone is none on memory."""
    monkeypatch.setattr(messages, "MAX_VALUES", 1000)
    say_again(decode_json(b"[" + unit * 400 + b"0]"))
    with pytest.raises(BadMessage, match="more than 1000 values"):
        decode_json(b"[" + unit * 1001 + b"0]")


@pytest.mark.parametrize(
    "text", ["1,2,[3],{4}\n" * 1000, '\\",' * 1000, '"' + '\\"' * 1000 + "," * 2000, "\\" * 999 + "," * 2000]
)
def test_values_in_a_text_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(messages, "MAX_VALUES", 100)
    value = {"data": {"text/csv": text, "more": ["[", ",", "{"]}}
    assert decode_json(orjson.dumps(value)) == value
    assert decode_json(json.dumps(value).encode()) == value


def test_a_figure_of_a_million_points_is_no_bomb() -> None:
    raw = orjson.dumps({"data": {"application/vnd.plotly.v1+json": {"x": list(range(1_000_000)), "y": [0.5] * 1_000_000}}})
    assert len(decode_json(raw)["data"]["application/vnd.plotly.v1+json"]["y"]) == 1_000_000


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'"text"', b"true", b"NaN"], ids=repr)
def test_an_object_is_an_object(raw: bytes) -> None:
    with pytest.raises(BadMessage, match="not a JSON object"):
        decode_object(raw)


@given(st.text(st.characters(categories=["L", "N", "Cs", "Cc"]), max_size=20))
def test_clean_text_can_be_encoded_and_keeps_what_could_be(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert cleaned == text


# whole messages


def parts(**changes: bytes) -> list[bytes]:
    fields = {
        "signature": b"s",
        "header": b'{"msg_type": "stream", "msg_id": "1"}',
        "parent": b'{"msg_id": "p"}',
        "metadata": b"{}",
        "content": b'{"text": "x"}',
        **changes,
    }
    return [DELIMITER, *fields.values()]


def test_a_message_of_a_real_session_is_split() -> None:
    session = Session(key=b"k")
    message = session.msg("display_data", {"data": {"a": "é"}}, parent={"header": {"msg_id": "parent"}})
    wire = session.serialize(message, ident=[b"topic", b"more"])
    found = split("iopub", [*wire, b"buffer 1", b"buffer 2"])
    assert found.channel == "iopub"
    assert found.msg_type == "display_data"
    assert found.parent_id == "parent"
    assert found.content() == {"data": {"a": "é"}}
    assert found.metadata() == {}
    assert found.buffers == (b"buffer 1", b"buffer 2")
    assert found.signature == session.sign(list(found.signed))


def test_identities_may_be_any_but_the_delimiter() -> None:
    assert split("shell", [b"a", b"", b"\xff", *parts()]).msg_type == "stream"
    # The first delimiter counts; the rest is content, however it looks.
    with pytest.raises(BadMessage):
        split("shell", [DELIMITER, *parts()])


@pytest.mark.parametrize(
    "wire",
    [
        [],
        [b""],
        [b"a", b"b"],
        [DELIMITER],
        parts()[:5],
        parts(header=b""),
        parts(header=b"[]"),
        parts(header=b"null"),
        parts(parent=b"7"),
        parts(parent=b"["),
        parts(header=b"[" * 100_000),
    ],
    ids=lambda wire: repr(wire)[:40],
)
def test_a_message_that_is_none(wire: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        split("iopub", wire)


@pytest.mark.parametrize("header", [b"{}", b'{"msg_type": 7}', b'{"msg_type": null}', b'{"msg_type": ["a"]}'])
def test_a_header_of_another_shape_has_a_type_nobody_knows(header: bytes) -> None:
    assert split("iopub", parts(header=header)).msg_type not in ("stream", "status")


@pytest.mark.parametrize("parent", [b"{}", b'{"msg_id": 7}', b'{"msg_id": null}', b'{"msg_id": {}}'])
def test_a_parent_of_another_shape_is_none(parent: bytes) -> None:
    assert split("iopub", parts(parent=parent)).parent_id is None


def test_content_is_decoded_only_when_somebody_asks() -> None:
    found = split("iopub", parts(content=b"not json", metadata=b"not json either"))
    for ask in (found.content, found.metadata):
        with pytest.raises(BadMessage):
            ask()


@given(st.lists(st.binary(max_size=30) | st.just(DELIMITER), max_size=10))
def test_any_parts(wire: list[bytes]) -> None:
    try:
        found = split("iopub", wire)
        say_again([found.header, found.parent, found.msg_type, found.parent_id])
        say_again([found.content(), found.metadata()])
    except BadMessage:
        return


def test_a_refused_bomb_leaves_nothing_behind() -> None:
    bomb = b'{"a":' * 200_000
    tracemalloc.start()
    try:
        for _ in range(20):
            with pytest.raises(BadMessage):
                decode_json(bomb)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
