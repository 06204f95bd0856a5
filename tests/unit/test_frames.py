"""The codec of the link: whatever one end packs the other unpacks, and whatever else comes is refused before it costs memory."""

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame, FrameError, Kind

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=10), JSON, max_size=4)
SEQ = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
FRAMES = st.builds(frames.pack, st.sampled_from(Kind), st.binary(max_size=200), SEQ)


def decode(data: bytes, max_frame: int = 1 << 20) -> list[Frame]:
    return Decoder(max_frame).feed(data)


@given(st.sampled_from(Kind), st.binary(max_size=1000), SEQ)
def test_every_kind_comes_out_as_it_went_in(kind: Kind, payload: bytes, seq: int) -> None:
    assert decode(frames.pack(kind, payload, seq)) == [Frame(kind, seq, payload)]


@given(OBJECTS, SEQ)
def test_json_frames_round_trip(value: dict[str, Any], seq: int) -> None:
    (frame,) = decode(frames.pack_json(Kind.EVENT, value, seq))
    assert (frame.kind, frame.seq, frames.unpack_json(frame.payload)) == (Kind.EVENT, seq, value)


@given(st.sampled_from(Channel), st.lists(st.binary(max_size=60), max_size=12), SEQ)
def test_messages_round_trip(channel: Channel, parts: list[bytes], seq: int) -> None:
    (frame,) = decode(frames.pack_message(channel, parts, seq))
    assert (frame.kind, frame.seq) == (Kind.MESSAGE, seq)
    assert frames.unpack_message(frame.payload, 12) == (channel, parts)
    assert frames.message_size(parts) == len(frame.payload)


@given(U32, st.binary(max_size=100), U32, OBJECTS)
def test_file_streams_round_trip(stream: int, chunk: bytes, size: int, value: dict[str, Any]) -> None:
    data, end, credit = decode(
        frames.pack_data(stream, chunk) + frames.pack_data_end(stream, value) + frames.pack_credit(stream, size)
    )
    assert (data.kind, frames.unpack_data(data.payload)) == (Kind.DATA, (stream, chunk))
    number, rest = frames.unpack_data(end.payload)
    assert (end.kind, number, frames.unpack_json(rest)) == (Kind.DATA_END, stream, value)
    assert (credit.kind, frames.unpack_credit(credit.payload)) == (Kind.CREDIT, (stream, size))


@given(st.lists(FRAMES, max_size=8), st.data())
def test_any_split_of_the_stream_gives_the_same_frames(packed: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(packed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder = Decoder(1 << 20)
    found: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == decode(stream)
    assert len(found) == len(packed)
    assert decoder.buffered == 0


def test_one_byte_at_a_time() -> None:
    stream = frames.pack_json(Kind.HELLO, {"version": 1}) + frames.pack(Kind.PING) + frames.pack_data(3, b"abc")
    decoder = Decoder(100)
    found = [frame for position in range(len(stream)) for frame in decoder.feed(stream[position : position + 1])]
    assert [frame.kind for frame in found] == [Kind.HELLO, Kind.PING, Kind.DATA]


@given(st.lists(FRAMES, min_size=1, max_size=4), st.integers(min_value=0))
def test_a_truncated_stream_gives_the_whole_frames_and_keeps_the_rest(packed: list[bytes], cut: int) -> None:
    stream = b"".join(packed)
    cut %= len(stream)
    decoder = Decoder(1 << 20)
    found = decoder.feed(stream[:cut])
    whole, size = 0, 0
    while size + len(packed[whole]) <= cut:
        size += len(packed[whole])
        whole += 1
    assert len(found) == whole
    assert decoder.buffered == cut - size


def feed_all(data: bytes) -> list[Frame]:
    """Everything that a reader does with frames; raises nothing but `FrameError`."""
    found = decode(data, 4096)
    for frame in found:
        for unpack in (
            frames.unpack_data,
            frames.unpack_credit,
            frames.unpack_json,
            lambda payload: frames.unpack_message(payload, 8),
        ):
            try:
                unpack(frame.payload)
            except FrameError:
                continue
    return found


@given(st.binary(max_size=300))
def test_garbage_gives_frames_or_a_frame_error(data: bytes) -> None:
    try:
        found = feed_all(data)
    except FrameError:
        return
    assert all(isinstance(frame.kind, Kind) for frame in found)


@given(st.lists(FRAMES, min_size=1, max_size=4), st.integers(min_value=0), st.integers(0, 255))
def test_a_changed_byte_gives_frames_or_a_frame_error(packed: list[bytes], position: int, value: int) -> None:
    stream = bytearray(b"".join(packed))
    stream[position % len(stream)] = value
    try:
        found = feed_all(bytes(stream))
    except FrameError:
        return
    assert sum(len(frame.payload) + frames.HEADER.size for frame in found) <= len(stream)


@pytest.mark.parametrize("length", [101, 4096, 2**31, 2**32 - 1])
def test_a_frame_above_the_limit_is_refused_by_its_header(length: int) -> None:
    decoder = Decoder(100)
    with pytest.raises(FrameError, match=f"frame of {length} bytes"):
        decoder.feed(frames.HEADER.pack(length, Kind.DATA, 0))
    assert decoder.buffered <= frames.HEADER.size


@pytest.mark.parametrize("length", [0, 99, 100])
def test_a_frame_up_to_the_limit_passes(length: int) -> None:
    assert decode(frames.pack(Kind.DATA, bytes(length)), 100) == [Frame(Kind.DATA, 0, bytes(length))]


@pytest.mark.parametrize("kind", [0, 14, 200, 255])
def test_an_unknown_kind_is_refused_by_its_header(kind: int) -> None:
    with pytest.raises(FrameError, match="unknown frame kind"):
        decode(frames.HEADER.pack(0, kind, 0))


def test_a_false_length_costs_no_memory() -> None:
    decoder = Decoder(128 * 1024 * 1024)
    tracemalloc.start()
    try:
        decoder.feed(frames.HEADER.pack(128 * 1024 * 1024, Kind.DATA, 0))
        for _ in range(100):
            decoder.feed(b"x" * 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoder.buffered == frames.HEADER.size + 100 * 100
    assert peak < 200_000


def test_an_endless_frame_costs_no_more_than_the_limit() -> None:
    """A peer that sends without end: what is kept never exceeds one frame and one read."""
    limit, read = 1_000_000, bytes(65_536)
    decoder = Decoder(limit)
    tracemalloc.start()
    try:
        decoder.feed(frames.HEADER.pack(limit, Kind.DATA, 0))
        most = 0
        for _ in range(limit // len(read)):
            assert decoder.feed(read) == []
            most = max(most, decoder.buffered)
        # The frame ends, and the zeros behind it are a header of no kind.
        with pytest.raises(FrameError, match="unknown frame kind 0"):
            decoder.feed(read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= limit + frames.HEADER.size
    assert peak < 6 * limit


def lying_table(channel: int, lengths: list[int], body: bytes, count: int | None = None) -> bytes:
    announced = len(lengths) if count is None else count
    return struct.pack("!BH", channel, announced) + struct.pack(f"!{len(lengths)}I", *lengths) + body


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "too short"),
        (b"\x01\x00", "too short"),
        (lying_table(0, [], b""), "unknown channel 0"),
        (lying_table(5, [], b""), "unknown channel 5"),
        (lying_table(255, [2], b"ab"), "unknown channel 255"),
        (lying_table(1, [2], b"abc"), "do not fill"),
        (lying_table(1, [4], b"abc"), "do not fill"),
        (lying_table(1, [2**32 - 1], b"abc"), "do not fill"),
        (lying_table(1, [2**32 - 1, 2**32 - 1, 6], b"abc"), "do not fill"),
        (lying_table(1, [], b"abc"), "do not fill"),
        (lying_table(1, [1, 1], b"ab", count=9), "9 parts announced"),
        (lying_table(1, [1, 1], b"ab", count=3), "3 parts announced"),
        (lying_table(1, [0] * 9, b""), "9 parts announced"),
        (lying_table(1, [], b"", count=65535), "65535 parts announced"),
    ],
)
def test_a_part_table_that_lies_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        frames.unpack_message(payload, 8)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_as_many_parts_as_allowed(count: int) -> None:
    payload = decode(frames.pack_message(1, [b"x"] * count, 1))[0].payload
    assert frames.unpack_message(payload, 8) == (Channel.SHELL, [b"x"] * count)


@pytest.mark.parametrize("size", [0, 7, 9, 100])
def test_credit_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(FrameError, match="wrong size"):
        frames.unpack_credit(bytes(size))


@pytest.mark.parametrize("size", range(4))
def test_data_without_a_stream_number_is_refused(size: int) -> None:
    with pytest.raises(FrameError, match="too short"):
        frames.unpack_data(bytes(size))


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"nonsense", b"\xff\xfe\x00", b"[1]", b"null", b"7", b'"text"', b"[" * 200_000, b'{"a":' * 200_000],
    ids=lambda payload: repr(payload[:12]),
)
def test_json_that_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError, match="not "):
        frames.unpack_json(payload)


def test_json_frames_are_plain_ascii_json() -> None:
    (frame,) = decode(frames.pack_json(Kind.EVENT, {"name": "é\udcff"}))
    assert frame.payload.isascii()
    assert json.loads(frame.payload) == {"name": "é\udcff"}
