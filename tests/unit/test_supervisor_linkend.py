"""The supervisor's end of the link, against a plain listening socket: what it keeps, what it sends again, and in what pieces."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.supervisor import frames
from gateway.supervisor.frames import Decoder, Frame, Kind
from gateway.supervisor.linkend import LinkEnd, LinkLost
from tests.unit.hosts import Host

WELCOME = {"secret": "s3cret", "received": 0, "max_frame": 1000, "max_unacknowledged": 100}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "s")
    yield host
    host.close()


@pytest.fixture
def link(host: Host) -> Iterator[LinkEnd]:
    link = LinkEnd(host.path)
    yield link
    link.close()


def dialled(link: LinkEnd, host: Host) -> dict[str, Any]:
    """Connects; what the greeting says."""
    assert link.dial(lambda: {"pid": 7})
    host.accept()
    link.flush()
    (hello,) = host.read()
    assert hello.kind is Kind.HELLO
    return frames.unpack_json(hello.payload)


def numbered(link: LinkEnd, *bodies: bytes) -> None:
    for body in bodies:
        seq = link.next_seq()
        link.send_numbered(seq, frames.pack(Kind.MESSAGE, body, seq))


def numbers(found: list[Frame]) -> list[int]:
    return [frame.seq for frame in found]


def test_nobody_listens(tmp_path: Path) -> None:
    link = LinkEnd(str(tmp_path / "nothing"))
    assert not link.dial(unasked)
    assert not link.connected


def unasked() -> dict[str, object] | None:
    raise AssertionError("Nobody is there to be told of the kernel.")


def test_a_gateway_that_accepts_no_more_holds_nobody_up(tmp_path: Path) -> None:
    """A stopped gateway: calls wait in the listener's queue, and once it is full `connect` would wait for ever."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        links = [LinkEnd(path) for _ in range(10)]
        found = [link.dial(lambda: None) for link in links]
        for link in links:
            link.close()
    assert found[0]
    assert not found[-1]


def test_the_greeting_says_who_it_is_and_what_it_has(link: LinkEnd, host: Host) -> None:
    speaks = {"version": frames.VERSION, "minimum": frames.MINIMUM_VERSION}
    assert dialled(link, host) == {**speaks, "epoch": 0, "secret": "", "received": 0, "kernel": {"pid": 7}}
    link.welcome({**WELCOME, "epoch": 3})
    link.received = 5
    link.close()
    assert dialled(link, host) == {**speaks, "epoch": 3, "secret": "s3cret", "received": 5, "kernel": {"pid": 7}}


@pytest.mark.parametrize("version", range(frames.MINIMUM_VERSION, frames.VERSION + 1))
def test_a_gateway_chooses_the_version(link: LinkEnd, host: Host, version: int) -> None:
    dialled(link, host)
    link.welcome({**WELCOME, "version": version})
    assert link.welcomed
    assert link.version == version


REFUSED = {
    "an older version": {"version": frames.MINIMUM_VERSION - 1},
    "a newer version": {"version": frames.VERSION + 1},
    "a lower epoch": {"epoch": 6},
    "no epoch": {},
}
NONSENSE = {
    "a version that is none": {"version": "two"},
    "an epoch that is none": {"epoch": None},
    "an epoch that is a truth": {"epoch": True},
    "a bound that is none": {"max_frame": "much"},
}


@pytest.mark.parametrize("terms", [*REFUSED.values(), *NONSENSE.values()], ids=[*REFUSED, *NONSENSE])
def test_of_a_refused_welcome_nothing_is_taken(link: LinkEnd, host: Host, terms: dict[str, object]) -> None:
    dialled(link, host)
    link.welcome({**WELCOME, "epoch": 7})
    numbered(link, b"kept")
    link.close()
    dialled(link, host)
    # An epoch above 7, unless the case is about it: what is refused must not become the highest that was seen either.
    welcome = {**WELCOME, "received": 1, "max_frame": 1, "max_unacknowledged": 1, "overflow": "drop", **terms}
    if "epoch" not in terms and terms:
        welcome["epoch"] = 8
    with pytest.raises((LinkLost, ValueError)):
        link.welcome(welcome)
    assert not link.welcomed
    assert (link.epoch, link.version, link.max_frame, link.max_unacknowledged) == (7, 1, 1000, 100)
    assert not link.is_safe(1)
    link.close()
    assert dialled(link, host)["epoch"] == 7


def test_gateways_of_the_same_or_a_higher_epoch_are_welcome(link: LinkEnd, host: Host) -> None:
    for epoch in (0, 2, 2, 9):
        dialled(link, host)
        link.welcome({**WELCOME, "epoch": epoch})
        assert link.welcomed
        assert link.epoch == epoch
        link.close()


def test_a_frame_is_safe_once_it_is_acknowledged(link: LinkEnd) -> None:
    numbered(link, b"1", b"2")
    assert [link.is_safe(seq) for seq in range(3)] == [True, False, False]
    link.acknowledge(1)
    assert [link.is_safe(seq) for seq in range(3)] == [True, True, False]
    link.acknowledge(2)
    assert link.is_safe(2)


def test_the_first_secret_stays(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome(WELCOME)
    link.welcome({**WELCOME, "secret": "another"})
    assert link.secret == "s3cret"


def test_numbered_frames_wait_for_the_welcome(link: LinkEnd, host: Host) -> None:
    numbered(link, b"before the dial")
    dialled(link, host)
    numbered(link, b"before the welcome")
    link.flush()
    assert host.read() == []
    link.welcome(WELCOME)
    numbered(link, b"after it")
    link.flush()
    found = host.read()
    assert numbers(found) == [1, 2, 3]
    assert [frame.payload for frame in found] == [b"before the dial", b"before the welcome", b"after it"]


def test_what_was_not_acknowledged_is_sent_again(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome(WELCOME)
    numbered(link, b"1", b"2", b"3", b"4")
    link.flush()
    assert numbers(host.read()) == [1, 2, 3, 4]
    link.acknowledge(1)
    link.close()
    numbered(link, b"5")
    dialled(link, host)
    link.welcome({**WELCOME, "received": 2})
    link.flush()
    assert numbers(host.read()) == [3, 4, 5]
    link.acknowledge(5)
    link.close()
    dialled(link, host)
    link.welcome(WELCOME)
    link.flush()
    assert host.read() == []


def test_acknowledging_what_was_never_sent_is_harmless(link: LinkEnd) -> None:
    numbered(link, b"1")
    link.acknowledge(2**63)
    link.acknowledge(0)
    assert not link.congested
    assert link.next_seq() == 2


def test_congestion_is_more_than_the_bound(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome(WELCOME)
    size = 100 - frames.HEADER.size
    for body, expected in ((bytes(size - 1), False), (b"", True)):
        numbered(link, body)
        assert link.congested is expected
    link.acknowledge(1)
    assert not link.congested
    numbered(link, bytes(100 - 2 * frames.HEADER.size))
    assert not link.congested
    link.acknowledge(3)
    numbered(link, bytes(size))
    assert not link.congested
    numbered(link, b"")
    assert link.congested


def fill(link: LinkEnd, size: int) -> None:
    """One frame more, of so many bytes."""
    numbered(link, bytes(size - frames.HEADER.size))


@pytest.mark.parametrize("terms", [{}, {"overflow": "wait"}, {"overflow": "something newer"}])
def test_where_the_kernel_waits_nothing_is_left_out(link: LinkEnd, host: Host, terms: dict[str, object]) -> None:
    dialled(link, host)
    link.welcome({**WELCOME, **terms})
    fill(link, 101)
    assert (link.congested, link.overflowing, link.full) == (True, False, True)


def test_where_outputs_are_left_out_the_rest_has_as_much_room_again(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome({**WELCOME, "overflow": "drop"})
    fill(link, 50)
    fill(link, 50)
    assert (link.overflowing, link.full) == (False, False)
    fill(link, 51)
    assert (link.overflowing, link.full) == (True, False)
    fill(link, 49)
    assert (link.overflowing, link.full) == (True, False)
    fill(link, 20)
    assert (link.overflowing, link.full) == (True, True)
    link.acknowledge(1)
    assert (link.overflowing, link.full) == (True, False)
    # 120 are left, then 69: there is room, but outputs come back only at the half.
    link.acknowledge(2)
    link.acknowledge(3)
    assert not link.congested
    assert link.overflowing
    link.acknowledge(4)
    assert not link.overflowing


def test_each_gateway_says_anew_what_becomes_of_the_overflow(link: LinkEnd, host: Host) -> None:
    fill(link, 150)
    for overflow, expected in (("wait", False), ("drop", True), ("wait", False), (None, False), ("drop", True)):
        dialled(link, host)
        link.welcome({**WELCOME, "overflow": overflow})
        assert link.overflowing is expected
        assert link.full is not expected
        link.close()
        # What the last gateway wanted holds while there is none.
        assert link.overflowing is expected


def test_unnumbered_frames_are_lost_with_the_stream(link: LinkEnd, host: Host) -> None:
    link.send(frames.pack(Kind.PONG))
    assert not link.wants_to_write
    dialled(link, host)
    link.send(frames.pack(Kind.PONG))
    link.close()
    dialled(link, host)
    assert host.read() == []


def test_a_backlog_makes_file_streams_wait(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    for _ in range(4):
        link.send(frames.pack(Kind.PONG))
    assert not link.backlog
    link.send(frames.pack(Kind.PONG))
    assert link.backlog
    link.flush()
    assert not link.backlog


def test_large_frames_go_out_in_pieces(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome({**WELCOME, "max_frame": 1 << 24})
    assert link._socket is not None
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    bodies = [os.urandom(size) for size in (1, 100_000, 10, 300_000, 0, 50_000)]
    numbered(link, *bodies)
    found: list[Frame] = []
    rounds = 0
    while len(found) < len(bodies):
        link.flush()
        found += host.read(1000)
        rounds += 1
    assert [frame.payload for frame in found] == bodies
    assert rounds > 10
    assert not link.wants_to_write


def test_a_frame_cut_by_a_loss_is_sent_whole_on_the_next_stream(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome(WELCOME)
    body = os.urandom(3_000_000)
    numbered(link, body, b"next")
    link.flush()
    assert link.wants_to_write
    host.hang_up()
    with pytest.raises(LinkLost):
        link.flush()
    link.close()
    dialled(link, host)
    link.welcome(WELCOME)
    found: list[Frame] = []
    while len(found) < 2:
        link.flush()
        found += host.read()
    assert [frame.payload for frame in found] == [body, b"next"]


def test_reading(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    assert link.read() == []
    sent = frames.pack(Kind.PING) + frames.pack(Kind.ACK, seq=3)
    host.send(sent[:-3])
    assert [frame.kind for frame in link.read()] == [Kind.PING]
    host.send(sent[-3:])
    assert [(frame.kind, frame.seq) for frame in link.read()] == [(Kind.ACK, 3)]


@pytest.mark.parametrize("data", [b"\xff" * 20, frames.HEADER.pack(2**31, Kind.PING, 0)], ids=["noise", "too large"])
def test_nonsense_from_the_gateway_loses_the_link(link: LinkEnd, host: Host, data: bytes) -> None:
    dialled(link, host)
    host.send(data)
    with pytest.raises(LinkLost):
        link.read()


def test_the_end_of_the_stream_loses_the_link(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    host.hang_up()
    with pytest.raises(LinkLost):
        link.read()


def test_a_new_stream_starts_with_a_clean_decoder(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    host.send(frames.pack(Kind.PING, b"x" * 50)[:-5])
    assert link.read() == []
    link.close()
    dialled(link, host)
    host.send(frames.pack(Kind.PING))
    assert [frame.kind for frame in link.read()] == [Kind.PING]


@pytest.mark.parametrize("cut", [1, frames.HEADER.size, 20, -1])
def test_half_a_welcome_is_none(link: LinkEnd, host: Host, cut: int) -> None:
    """The gateway is killed while it writes."""
    dialled(link, host)
    host.send(frames.pack_json(Kind.WELCOME, WELCOME)[:cut])
    host.hang_up()
    assert link.read() == []
    with pytest.raises(LinkLost):
        link.read()
    link.close()
    assert dialled(link, host)["secret"] == ""
    host.send(frames.pack_json(Kind.WELCOME, WELCOME))
    (frame,) = link.read()
    link.welcome(frames.unpack_json(frame.payload))
    assert link.secret == "s3cret"


def test_last_words_are_written_before_the_end(link: LinkEnd, host: Host) -> None:
    dialled(link, host)
    link.welcome(WELCOME)
    numbered(link, b"1", b"2")
    link.drain(5.0)
    assert numbers(host.read()) == [1, 2]


def test_last_words_to_nobody(link: LinkEnd, host: Host) -> None:
    link.drain(0.1)
    dialled(link, host)
    link.welcome(WELCOME)
    numbered(link, bytes(3_000_000))
    link.drain(0.05)
    host.hang_up()
    link.drain(0.05)


def test_stdin_and_stdout_are_a_link_too() -> None:
    """In a process of its own, since it is about the descriptors 0 and 1."""
    program = """if True:
        import os, select
        from gateway.supervisor.linkend import LinkEnd, LinkLost
        from gateway.supervisor import frames
        link = LinkEnd(None)
        assert link.dial(lambda: None)
        link.flush()
        select.select([0], [], [], 10)
        for frame in link.read():
            link.send(frames.pack(frames.Kind.PONG, frame.payload))
        link.flush()
        select.select([0], [], [], 10)
        try:
            link.read()
        except LinkLost:
            link.send(frames.pack(frames.Kind.PONG, b"lost"))
            link.drain(5.0)
    """
    asked = frames.pack(Kind.PING, b"over stdio")
    done = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, timeout=30, check=True)
    hello, pong, last = Decoder(1000).feed(done.stdout)
    assert hello.kind is Kind.HELLO
    assert (pong.kind, pong.payload, last.payload) == (Kind.PONG, b"over stdio", b"lost")
