"""The conversation with one kernel process: signed both ways, and whatever is not is counted and dropped."""

from typing import Any

import anyio
import pytest
from jupyter_client.session import Session
from structlog.testing import capture_logs

from gateway.kernels.client import KernelClient
from gateway.supervisor.frames import Channel
from tests.unit.recorders import KernelVoice, RecordingLink
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def link() -> RecordingLink:
    return RecordingLink()


@pytest.fixture
def client(link: RecordingLink) -> KernelClient:
    client = KernelClient(link)
    client.process_started(7)
    return client


@pytest.fixture
def voice(client: KernelClient) -> KernelVoice:
    return KernelVoice(client)


def test_what_is_sent_is_signed_with_the_kernels_key(client: KernelClient, link: RecordingLink) -> None:
    msg_id = client.send(Channel.SHELL, "execute_request", {"code": "é"})
    (parts,) = link.wire
    session = Session(key=client.key.encode())
    message = session.deserialize(parts[1:])
    assert message["content"] == {"code": "é"}
    assert message["header"]["msg_id"] == msg_id
    assert message["header"]["msg_type"] == "execute_request"
    assert message["parent_header"] == {}


def test_an_answer_carries_the_header_it_answers(client: KernelClient, link: RecordingLink) -> None:
    client.send(Channel.STDIN, "input_reply", {"value": "x"}, parent={"msg_id": "q", "msg_type": "input_request"})
    channel, _header, parent, _content = link.messages[0]
    assert channel is Channel.STDIN
    assert parent["msg_id"] == "q"


def test_each_process_has_a_key_of_its_own(link: RecordingLink) -> None:
    keys = {KernelClient(link).key for _ in range(50)}
    assert len(keys) == 50
    assert min(map(len, keys)) == 64


def test_good_messages_come_through(client: KernelClient, voice: KernelVoice) -> None:
    batch = [
        voice.frame(Channel.IOPUB, "stream", {"text": "a"}, "p"),
        voice.frame(Channel.SHELL, "execute_reply", {"status": "ok"}, "p"),
    ]
    found = list(client.take(batch))
    assert [(message.channel, message.msg_type, message.parent_id) for message in found] == [
        ("iopub", "stream", "p"),
        ("shell", "execute_reply", "p"),
    ]
    assert found[0].content() == {"text": "a"}
    assert client.bad_messages == 0


def changed(parts: list[bytes], position: int, value: bytes) -> list[bytes]:
    return [*parts[:position], value, *parts[position + 1 :]]


def test_a_wrong_signature_is_counted_and_dropped(client: KernelClient, voice: KernelVoice) -> None:
    good = voice.session.serialize(voice.session.msg("stream", {"text": "a"}))
    stranger = Session(key=b"guess", username="kernel")
    unsigned = Session(key=b"")
    batch = [
        voice.pack(4, good),
        voice.pack(4, stranger.serialize(stranger.msg("stream", {"text": "b"}))),
        voice.pack(4, unsigned.serialize(unsigned.msg("stream", {"text": "c"}))),
        voice.pack(4, changed(good, 1, b"")),
        voice.pack(4, changed(good, 1, b"0" * 64)),
        voice.pack(4, changed(good, 1, b"\xff\xfe")),
        voice.pack(4, changed(good, 1, good[1].upper())),
        voice.pack(4, changed(good, 1, good[1] + b"0")),
        *(voice.pack(4, changed(good, position, b'{"a":1}')) for position in (2, 3, 4, 5)),
    ]
    assert len(list(client.take(batch))) == 1
    assert client.bad_messages == len(batch) - 1


def test_a_message_with_another_key_of_an_earlier_process_is_dropped(link: RecordingLink) -> None:
    before, after = KernelClient(link), KernelClient(link)
    assert list(after.take([KernelVoice(before).frame(Channel.IOPUB, "stream", {"text": "late"})])) == []
    assert after.bad_messages == 1


@pytest.mark.parametrize(
    "parts", [[], [b""], [b"<IDS|MSG>"], [b"<IDS|MSG>", b"", b"{}"], [b"x"] * 9, [b"<IDS|MSG>", b"", b"[", b"{}", b"{}", b"{}"]]
)
def test_what_is_no_message_is_counted_and_dropped(client: KernelClient, voice: KernelVoice, parts: list[bytes]) -> None:
    good = voice.frame(Channel.IOPUB, "stream", {"text": "a"})
    assert [m.msg_type for m in client.take([voice.pack(4, parts), good])] == ["stream"]
    assert client.bad_messages == 1


def test_a_message_of_too_many_parts_costs_its_neighbours_nothing() -> None:
    """How many parts a message has is up to the kernel; the supervisor has only packed them."""
    client = KernelClient(RecordingLink(max_parts=8))
    voice = KernelVoice(client)
    good = voice.session.serialize(voice.session.msg("stream", {"text": "a"}))
    batch = [voice.pack(4, good), voice.pack(4, [*good, *[b"buffer"] * 20]), voice.pack(4, [*good, b"b1", b"b2"])]
    assert [message.buffers for message in client.take(batch)] == [(), (b"b1", b"b2")]
    assert client.bad_messages == 1


def test_a_flood_of_bad_messages_is_no_flood_of_log_lines(client: KernelClient) -> None:
    with capture_logs() as lines:
        for _ in range(10_000):
            client.count_bad("x")
    assert client.bad_messages == 10_000
    assert [line["count"] for line in lines] == [1 << n for n in range(14)]


# the first answer


async def test_the_first_answer_needs_both_directions(client: KernelClient, link: RecordingLink, voice: KernelVoice) -> None:
    results: list[bool] = []

    async def ask() -> None:
        results.append(await client.first_answer())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: link.messages)
        channel, header, *_ = link.messages[0]
        assert (channel, header["msg_type"]) == (Channel.SHELL, "kernel_info_request")
        first = header["msg_id"]
        assert list(client.take([voice.frame(Channel.SHELL, "kernel_info_reply", {}, first)])) == []
        # Nothing came on iopub, so it asks again.
        await until(lambda: len(link.messages) == 2)
        assert results == []
        second = link.messages[1][1]["msg_id"]
        assert list(client.take([voice.frame(Channel.IOPUB, "status", {}, second)])) == []
        assert list(client.take([voice.frame(Channel.SHELL, "kernel_info_reply", {}, second)])) == []
    assert results == [True]


async def test_a_process_that_ends_before_it_answers(client: KernelClient) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expect_end, client)
        await anyio.sleep(0.01)
        client.process_ended({"code": 1})


async def test_a_process_that_ended_before_it_was_asked(client: KernelClient) -> None:
    client.process_ended({"code": 1})
    await expect_end(client)


async def test_a_process_that_answers_and_ends_in_one_breath(
    client: KernelClient, link: RecordingLink, voice: KernelVoice
) -> None:
    """Dead is never taken for alive, however late the death comes."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expect_end, client)
        await until(lambda: link.messages)
        msg_id = link.messages[0][1]["msg_id"]
        list(client.take([voice.frame(Channel.SHELL, "kernel_info_reply", {}, msg_id)]))
        await anyio.sleep(0.01)
        list(client.take([voice.frame(Channel.IOPUB, "status", {}, msg_id)]))
        client.process_ended({"code": 1})


@pytest.mark.parametrize("known", [False, True], ids=["before the start is known", "after it"])
def test_the_end_of_the_process_before_it_is_not_its_own(link: RecordingLink, known: bool) -> None:
    """It may be told after the order to start anew was given."""
    client = KernelClient(link)
    if known:
        client.process_started(8)
    assert not client.process_ended({"pid": 7, "code": 1})
    client.process_started(8)
    assert client.exit_info is None
    assert client.process_ended({"pid": 8, "code": 2})
    assert client.exit_info == {"pid": 8, "code": 2}


def test_an_end_told_with_the_start_is_its_own(link: RecordingLink) -> None:
    client = KernelClient(link)
    assert not client.process_ended({"pid": 8, "code": 2})
    client.process_started(8)
    assert client.exit_info == {"pid": 8, "code": 2}


@pytest.mark.parametrize(("started", "ended"), [(None, 7), (7, None), ("7", 7), (7, "7"), (None, None)])
def test_an_end_without_a_number_is_taken_for_its_own(link: RecordingLink, started: object, ended: object) -> None:
    client = KernelClient(link)
    client.process_started(started)
    assert client.process_ended({"pid": ended})


async def expect_end(client: KernelClient) -> None:
    with anyio.fail_after(5):
        assert await client.first_answer() is False


# questions on control


async def test_a_question_is_answered_on_control_alone(client: KernelClient, link: RecordingLink, voice: KernelVoice) -> None:
    answers: list[dict[str, Any]] = []

    async def ask() -> None:
        answers.append(await client.ask("some_request", {"most": 5}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: link.messages)
        channel, header, _parent, content = link.messages[0]
        assert (channel, content) == (Channel.CONTROL, {"most": 5})
        other = voice.frame(Channel.IOPUB, "status", {"execution_state": "busy"}, header["msg_id"])
        reply = voice.frame(Channel.CONTROL, "some_reply", {"a": 1}, header["msg_id"])
        again = voice.frame(Channel.CONTROL, "some_reply", {"a": 2}, header["msg_id"])
        assert list(client.take([other, reply, again])) == []
    assert answers == [{"a": 1}]
    assert not client._questions


async def test_a_question_nobody_answers_is_forgotten(client: KernelClient) -> None:
    with anyio.move_on_after(0.01):
        await client.ask("some_request", {})
    assert not client._questions


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, []),
        ({"variables": None}, []),
        ({"variables": "x"}, []),
        ({"variables": [1, None, {"name": "a"}, {"name": "b", "size": "big"}]}, []),
        (
            {"variables": [{"name": "n" * 500, "type": ["x"], "size": 3, "more": 1}]},
            [{"name": "n" * 100, "type": "['x']", "size": 3}],
        ),
        (
            {"variables": [{"name": f"v{n}", "type": "int", "size": n} for n in range(50)]},
            [{"name": f"v{n}", "type": "int", "size": n} for n in range(5)],
        ),
    ],
)
async def test_the_largest_variables_are_what_they_claim_to_be(
    client: KernelClient, link: RecordingLink, voice: KernelVoice, content: dict[str, Any], expected: list[Any]
) -> None:
    found: list[Any] = []

    async def ask() -> None:
        found.extend(await client.largest_variables())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: link.messages)
        list(client.take([voice.frame(Channel.CONTROL, "reply", content, link.messages[0][1]["msg_id"])]))
    assert found == expected
