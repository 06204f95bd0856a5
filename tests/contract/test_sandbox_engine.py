"""One suite for every engine: what kernels may rely on, whatever their boxes are made of.

It speaks to the boxes over their links as the rest of the gateway does. Times in it are bounds on waiting, never on speed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from gateway.errors import EngineUnavailable, FileMissing, GatewayError, ImageMissing, InvalidPath, LinkClosed, SandboxTimeout
from gateway.kernels.client import KernelClient
from gateway.sandboxes import transfer
from gateway.sandboxes.base import FoundSandbox, Limits, Sandbox, SandboxEngine, SandboxExit, SandboxSpec
from gateway.sandboxes.link import Link
from gateway.settings import MIB, LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame, Kind
from tests.contract.engines import YARDS, DockerYard, Yard, new_id, yard

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PATIENCE = 60.0
IMAGE = "cellgate-kernel:latest"
OUR_LABELS = {f"org.cellgate.{name}" for name in ("gateway", "kernel", "epoch", "owner", "expires")}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=YARDS)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Yard]:
    async with yard(request.param) as found:
        yield found


adopting = pytest.mark.parametrize("place", [name for name in YARDS if name != "docker-stdio"], indirect=True)
"""Engines whose boxes outlive their gateway."""
labelling = pytest.mark.parametrize("place", [name for name in YARDS if name != "fake"], indirect=True)


class Bench:
    """One engine of one gateway; every box that it makes is removed at the end."""

    def __init__(self, place: Yard, gateway_id: str) -> None:
        self.place, self.id = place, gateway_id
        self.engine: SandboxEngine = place.engine(gateway_id)
        self.made: list[Box] = []

    async def create(self, lifetime: float = 600.0, silence: float = 60.0, image: str = IMAGE, **labels: Any) -> "Box":
        box = Box(lifetime, silence)
        spec = SandboxSpec(box.kernel_id, image, Limits(512 * MIB, 1.0, 64), 32 * MIB, 32 * MIB, 16 * MIB, **labels)
        box.sandbox = await self.engine.create(spec, box.make_link)
        self.made.append(box)
        return box

    async def adopt(self, earlier: "Box") -> "Box":
        """As a gateway does that knows from its store what the earlier one knew."""
        box = Box(*earlier.terms, earlier)
        box.sandbox = await self.engine.adopt(box.kernel_id, box.make_link)
        self.made.append(box)
        return box

    async def found(self) -> dict[str, FoundSandbox]:
        return {sandbox.kernel_id: sandbox for sandbox in await self.engine.list()}

    async def connected(self, **terms: Any) -> "Box":
        box = await self.create(**terms)
        await box.wait_connected()
        return box

    async def boxes(self) -> set[str]:
        return await self.place.boxes(self.id)


class Box:
    """A sandbox as the kernels room would hold it: its link, and what has come over it."""

    sandbox: Sandbox
    link: Link
    kernel_id: str

    def __init__(self, lifetime: float, silence: float, earlier: "Box | None" = None) -> None:
        self.kernel_id = earlier.kernel_id if earlier else new_id()
        self.epoch: int = earlier.epoch + 1 if earlier else 1
        self.frames: list[Frame] = []
        self.client: KernelClient | None = None
        self.safe: int | None = None
        """Number of the last frame whose effects count as stored; None: that of the last one that came."""
        self.terms = lifetime, silence
        self._earlier = earlier

    def make_link(self) -> Link:
        settings, earlier = LinkSettings(command_timeout=20.0), self._earlier
        known: dict[str, Any] = {}
        if earlier is not None:
            news = earlier.link.take_news()
            received = news.received if earlier.safe is None else earlier.safe
            known = {"secret": earlier.link.secret, "received": received, "sent": news.sent}
        self.link = Link(settings, self._take, *self.terms, epoch=self.epoch, **known)
        if earlier is not None and earlier.client is not None:
            self.client = KernelClient(self.link, earlier.client.key)
            self.client.process_started(earlier.client.pid)
        return self.link

    def store_nothing(self) -> None:
        """From now on no frame is acknowledged."""
        self.safe = self.link.take_news().received
        self.link.guard(lambda _within: None)

    async def answers(self) -> bool:
        """Whether the kernel process does."""
        assert self.client is not None
        before = len(replies(self))
        self.client.send(Channel.SHELL, "kernel_info_request", {})
        await until(lambda: len(replies(self)) > before)
        return True

    def _take(self, batch: list[Frame]) -> None:
        self.frames += batch
        if self.client is not None:
            list(self.client.take(frame for frame in batch if frame.kind is Kind.MESSAGE))

    async def wait_connected(self) -> None:
        with anyio.fail_after(PATIENCE):
            await self.link.connected.wait()

    @property
    def exits(self) -> list[dict[str, Any]]:
        events = [frames.unpack_json(frame.payload) for frame in self.frames if frame.kind is Kind.EVENT]
        return [event for event in events if event.get("event") == "kernel_exit"]

    async def start_kernel(self) -> dict[str, Any]:
        """A kernel process that has answered."""
        self.client = KernelClient(self.link)
        started = await self.link.command("start", kernelspec="python3", key=self.client.key, env={})
        self.client.process_started(started.get("pid"))
        with anyio.fail_after(PATIENCE):
            assert await self.client.first_answer()
        return started

    async def ended(self) -> SandboxExit:
        """How the box ended, once the engine says so."""
        found: list[SandboxExit] = []

        async def look() -> bool:
            if end := await self.sandbox.exit():
                found.append(end)
            return bool(found)

        await until(look)
        return found[0]


async def until(condition: Callable[[], Any]) -> None:
    with anyio.fail_after(PATIENCE):
        while True:
            found = condition()
            if found is not True and hasattr(found, "__await__"):
                found = await found
            if found:
                return
            await anyio.sleep(0.05)


@contextlib.asynccontextmanager
async def gateway(place: Yard) -> AsyncIterator[Bench]:
    bench = Bench(place, new_id())
    before = tasks_of_its_own()
    try:
        report = await bench.engine.check()
        assert report.problems == []
        yield bench
    finally:
        with anyio.CancelScope(shield=True):
            for box in bench.made:
                await box.sandbox.remove()
            left = await bench.boxes()
            for found in await bench.engine.list():
                await bench.engine.discard(found.kernel_id)
            after = await bench.boxes()
            await bench.engine.aclose()
    assert (left, after) == (set(), set())
    assert tasks_of_its_own() <= before


def tasks_of_its_own() -> set[Any]:
    """Without those of AnyIO's test runner, which has another for each part of a test."""
    return {task for task in asyncio.all_tasks() if "TestRunner" not in repr(task.get_coro())}


@pytest.fixture
async def bench(place: Yard) -> AsyncIterator[Bench]:
    async with gateway(place) as found:
        yield found


# a life


async def test_a_box_lives_and_ends(bench: Bench) -> None:
    box = await bench.connected()
    assert await bench.boxes() == {box.kernel_id}
    assert await box.sandbox.exit() is None
    started = await box.start_kernel()
    assert started["interrupt_mode"] in ("signal", "message")
    await box.link.command("kill")
    await until(lambda: box.exits)
    assert box.exits[0]["signal"] == "SIGKILL"
    # The process is not the box: another one may be started in it.
    await box.start_kernel()
    assert await box.sandbox.exit() is None
    await box.link.command("end")
    assert (await box.ended()).code == 0
    with anyio.fail_after(PATIENCE):
        await box.link.lost.wait()
    await box.sandbox.remove()
    assert await bench.boxes() == set()
    assert (await box.ended()).removed


async def test_messages_pass_both_ways_in_order(bench: Bench) -> None:
    box = await bench.connected()
    await box.start_kernel()
    assert box.client is not None
    box.frames.clear()
    for _ in range(50):
        box.client.send(Channel.SHELL, "kernel_info_request", {})
    await until(lambda: len(replies(box)) == 50)
    numbers = [frame.seq for frame in box.frames]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def replies(box: Box) -> list[Frame]:
    messages = [frame for frame in box.frames if frame.kind is Kind.MESSAGE]
    return [frame for frame in messages if frames.unpack_message(frame.payload, 4096)[0] is Channel.SHELL]


async def test_removing_twice_and_at_once_is_no_error(bench: Bench) -> None:
    box = await bench.connected()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.sandbox.remove)
        tasks.start_soon(box.sandbox.remove)
    await box.sandbox.remove()
    assert await bench.boxes() == set()


async def test_a_box_is_removed_at_any_moment(bench: Bench) -> None:
    """Right after it was made, before anybody has called."""
    for pause in (0.0, 0.05, 0.2):
        box = await bench.create()
        await anyio.sleep(pause)
        await box.sandbox.remove()
    assert await bench.boxes() == set()


async def test_commands_under_way_fail_when_the_box_is_removed(bench: Bench) -> None:
    box = await bench.connected()
    pending = box.link.post("list", path="")
    await box.sandbox.remove()
    with contextlib.suppress(LinkClosed):
        # Answered before the end, or failed by it: but never left waiting.
        await box.link.reply(*pending, "list", deadline=5.0)
    with pytest.raises(LinkClosed):
        await box.link.command("list", path="")


async def test_boxes_side_by_side_have_links_of_their_own(bench: Bench) -> None:
    boxes: list[Box] = []

    async def make() -> None:
        boxes.append(await bench.connected())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(make)
    for number, box in enumerate(boxes):
        await transfer.write(box.link, "write", "mine", pieces(b"%d" % number))
    assert [await collect(transfer.read(box.link, "read", "mine")) for box in boxes] == [b"0", b"1", b"2"]


# ends that nobody asked for


async def test_a_box_that_is_removed_from_outside(bench: Bench) -> None:
    box = await bench.connected()
    await bench.place.remove_from_outside(box.sandbox)
    with anyio.fail_after(PATIENCE):
        await box.link.lost.wait()
    assert await box.ended() == SandboxExit(None, oom_killed=False, removed=True)
    await box.sandbox.remove()


async def test_a_box_ends_itself_when_its_lifetime_is_over(bench: Bench) -> None:
    box = await bench.connected(lifetime=1.5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ping, box)
        end = await box.ended()
        tasks.cancel_scope.cancel()
    assert (end.code, end.removed) == (3, False)


async def test_a_box_ends_itself_in_silence(bench: Bench) -> None:
    box = await bench.connected(silence=1.0)
    end = await box.ended()
    assert (end.code, end.removed) == (4, False)


async def test_a_box_that_is_spoken_to_does_not_end_itself(bench: Bench) -> None:
    box = await bench.connected(silence=2.5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ping, box)
        await anyio.sleep(6)
        tasks.cancel_scope.cancel()
    assert await box.sandbox.exit() is None


async def ping(box: Box) -> None:
    while True:
        box.link.post_frame(frames.pack(Kind.PING))
        await anyio.sleep(0.2)


async def test_a_stream_that_the_gateway_drops(bench: Bench) -> None:
    """Where the box dials, it dials again and nothing is lost; where the stream is the box's own, it ends and says so."""
    box = await bench.connected()
    await box.start_kernel()
    assert box.client is not None
    for _ in range(3):
        transport = box.link._transport
        assert transport is not None
        transport.abort()
        with anyio.fail_after(PATIENCE):
            await box.link.lost.wait()
        if not bench.place.redials:
            assert (await box.ended()).code == 5
            return
        before = len(replies(box))
        box.client.send(Channel.SHELL, "kernel_info_request", {})
        await box.wait_connected()
        await until(lambda before=before: len(replies(box)) > before)  # type: ignore[misc]
    numbers = [frame.seq for frame in box.frames]
    assert numbers == list(range(1, len(numbers) + 1))
    assert await box.sandbox.exit() is None


async def test_a_frozen_box_is_there_again_when_it_is_thawed(bench: Bench) -> None:
    box = await bench.connected(silence=3.0)
    await transfer.write(box.link, "write", "kept", pieces(b"state"))
    await box.sandbox.freeze()
    await box.sandbox.freeze()
    assert await box.sandbox.exit() is None
    with pytest.raises(SandboxTimeout):
        await box.link.command("list", deadline=0.5, path="")
    # Longer than it may go without a gateway: time in which it was frozen does not count.
    await anyio.sleep(5)
    await box.sandbox.thaw()
    await box.sandbox.thaw()
    assert await collect(transfer.read(box.link, "read", "kept")) == b"state"


async def test_a_frozen_box_can_be_removed(bench: Bench) -> None:
    box = await bench.connected()
    await box.sandbox.freeze()
    await box.sandbox.thaw()
    await box.sandbox.freeze()
    await box.sandbox.remove()
    assert await bench.boxes() == set()


# files


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def collect(found: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in found])


async def test_files_go_in_and_out(bench: Bench) -> None:
    box = await bench.connected()
    content = bytes(range(256)) * 12_000
    assert await transfer.write(box.link, "write", "a/b/file", pieces(content[:1000], content[1000:])) == {"size": len(content)}
    assert await collect(transfer.read(box.link, "read", "a/b/file")) == content
    assert await transfer.ask(box.link, "stat", path="a/b/file") == {"type": "file", "size": len(content)}
    assert (await transfer.ask(box.link, "stat", path="a"))["type"] == "directory"
    (entry,) = (await transfer.ask(box.link, "list", path="a/b"))["entries"]
    assert (entry["path"], entry["name"], entry["type"], entry["size"]) == ("a/b/file", "file", "file", len(content))
    assert await transfer.write(box.link, "write", "a/b/file", pieces(b"")) == {"size": 0}
    assert await collect(transfer.read(box.link, "read", "a/b/file")) == b""
    await transfer.ask(box.link, "delete", path="a")
    assert (await transfer.ask(box.link, "list", path=""))["entries"] == []


@pytest.mark.parametrize("op", ["stat", "list", "delete"])
async def test_files_that_are_refused(bench: Bench, op: str) -> None:
    box = await bench.connected()
    for path, expected in (("missing", FileMissing), ("../etc/passwd", InvalidPath), ("/etc/passwd", InvalidPath)):
        with pytest.raises(expected):
            await transfer.ask(box.link, op, path=path)
        with pytest.raises(expected):
            await collect(transfer.read(box.link, "read", path))
    with pytest.raises(InvalidPath):
        await transfer.write(box.link, "write", "../x", pieces(b"x"))


async def test_a_transfer_that_is_broken_off_leaves_nothing(bench: Bench) -> None:
    box = await bench.connected()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(100_000)
            await anyio.sleep(0.01)

    with anyio.move_on_after(0.3) as scope:
        await transfer.write(box.link, "write", "never", endless())
    assert scope.cancelled_caught
    assert (await transfer.ask(box.link, "list", path=""))["entries"] == []


# what could not be made


async def test_an_image_that_is_not_there_leaves_nothing(bench: Bench) -> None:
    with pytest.raises(ImageMissing):
        await bench.create(image="cellgate-no-such-image:latest")
    assert await bench.boxes() == set()
    assert bench.place.leftovers() == []
    await bench.connected()


async def test_a_create_that_is_broken_off_leaves_nothing(bench: Bench) -> None:
    """Whatever it was doing at that moment."""
    for number in range(8):
        with anyio.move_on_after(0.03 * number):
            await bench.create()
        while bench.made:
            await bench.made.pop().sandbox.remove()
    assert await bench.boxes() == set()
    assert bench.place.leftovers() == []


# The Docker SDK leaves a socket that could not be connected to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
async def test_an_engine_that_does_not_answer(place: Yard) -> None:
    engine = place.broken_engine()
    spec = SandboxSpec(new_id(), IMAGE, Limits(512 * MIB, 1.0, 64), MIB, MIB, MIB)
    calls: list[Callable[[], Any]] = [
        engine.check,
        engine.list,
        lambda: engine.discard(spec.kernel_id),
        lambda: engine.create(spec, Box(1.0, 1.0).make_link),
    ]
    for call in calls:
        with pytest.raises(EngineUnavailable) as error:
            await call()
        assert isinstance(error.value, GatewayError)
        assert error.value.retryable
    await engine.aclose()
    assert place.leftovers() == []


# gateways that follow each other


@contextlib.asynccontextmanager
async def successor(bench: Bench) -> AsyncIterator[Bench]:
    """Another engine of the same identity, as a new gateway process has it."""
    later = Bench(bench.place, bench.id)
    await later.engine.check()
    try:
        yield later
    finally:
        with anyio.CancelScope(shield=True):
            for box in later.made:
                await box.sandbox.remove()
            await later.engine.aclose()


async def test_whether_boxes_can_be_adopted(bench: Bench) -> None:
    assert bench.engine.adopts is bench.place.redials
    if not bench.engine.adopts:
        with pytest.raises(RuntimeError):
            await bench.engine.adopt(new_id(), Box(1.0, 1.0).make_link)


@pytest.mark.parametrize("way", ["detached", "abandoned"])
@adopting
async def test_a_box_goes_on_under_the_next_gateway(bench: Bench, way: str) -> None:
    box = await bench.connected()
    await box.start_kernel()
    await transfer.write(box.link, "write", "kept", pieces(b"state"))
    async with successor(bench) as later:
        if way == "detached":
            await box.sandbox.detach()
        else:
            bench.place.abandon(box.sandbox)
        assert (await later.found())[box.kernel_id].running
        taken = await later.adopt(box)
        await taken.wait_connected()
        assert await taken.answers()
        assert await collect(transfer.read(taken.link, "read", "kept")) == b"state"
        assert taken.exits == []
        assert await taken.sandbox.exit() is None
        numbers = [frame.seq for frame in box.frames + taken.frames]
        assert numbers == list(range(1, len(numbers) + 1))
        await taken.link.command("end")
        assert (await taken.ended()).code == 0
        await taken.sandbox.remove()
        assert (await taken.ended()).removed
        assert await later.boxes() == set()


@adopting
async def test_a_box_is_handed_on_again_and_again(bench: Bench) -> None:
    box = await bench.connected()
    await box.start_kernel()
    async with successor(bench) as later:
        for _ in range(3):
            await box.sandbox.detach()
            box = await later.adopt(box)
            await box.wait_connected()
            assert await box.answers()


@adopting
async def test_what_was_not_stored_comes_again_exactly_once(bench: Bench) -> None:
    """Neither what the gateway before had read, nor what came while there was none."""
    box = await bench.connected()
    await box.start_kernel()
    box.store_nothing()
    assert box.safe is not None
    stored = [frame for frame in box.frames if frame.seq <= box.safe]
    async with successor(bench) as later:
        await box.link.command("kill")
        await until(lambda: box.exits)
        bench.place.abandon(box.sandbox)
        taken = await later.adopt(box)
        await taken.wait_connected()
        await until(lambda: taken.exits)
        numbers = [frame.seq for frame in stored + taken.frames]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(taken.exits) == 1
        assert [frame for frame in box.frames if frame.seq > box.safe] == taken.frames[: len(box.frames) - len(stored)]


@adopting
async def test_messages_that_were_under_way_arrive_exactly_once(bench: Bench) -> None:
    box = await bench.connected()
    await box.start_kernel()
    assert box.client is not None
    async with successor(bench) as later:
        before = len(replies(box))
        asked = [box.client.send(Channel.SHELL, "kernel_info_request", {}) for _ in range(20)]
        # Of the answers some come to this gateway and some to the next, but every one to one of them.
        await until(lambda: len(replies(box)) > before)
        bench.place.abandon(box.sandbox)
        taken = await later.adopt(box)
        await taken.wait_connected()
        await until(lambda: len(replies(box)) - before + len(replies(taken)) >= len(asked))
        assert await taken.answers()
        assert len(replies(box)) - before + len(replies(taken)) == len(asked) + 1
        numbers = [frame.seq for frame in box.frames + taken.frames]
        assert numbers == list(range(1, len(numbers) + 1))


@adopting
async def test_a_frozen_box_is_adopted_and_thawed(bench: Bench) -> None:
    box = await bench.connected()
    await box.start_kernel()
    await box.sandbox.freeze()
    async with successor(bench) as later:
        bench.place.abandon(box.sandbox)
        assert (await later.found())[box.kernel_id].running
        taken = await later.adopt(box)
        await taken.wait_connected()
        assert await taken.answers()


@adopting
async def test_a_box_that_ended_meanwhile_is_adopted_and_tells_how(bench: Bench) -> None:
    ended, removed = await bench.connected(), await bench.connected()
    async with successor(bench) as later:
        with contextlib.suppress(LinkClosed):
            await ended.link.command("end")
        await ended.ended()
        await bench.place.remove_from_outside(removed.sandbox)
        for box in (ended, removed):
            await box.sandbox.detach()
        assert not (await later.found())[ended.kernel_id].running
        taken = [await later.adopt(box) for box in (ended, removed)]
        assert await taken[0].sandbox.exit() == SandboxExit(0, oom_killed=False)
        assert await taken[1].sandbox.exit() == SandboxExit(None, oom_killed=False, removed=True)


@adopting
async def test_an_adoption_that_is_broken_off_can_be_done_again(bench: Bench) -> None:
    box = await bench.connected()
    await box.start_kernel()
    async with successor(bench) as later:
        await box.sandbox.detach()
        for number in range(5):
            with anyio.move_on_after(0.004 * number):
                taken = await later.adopt(box)
                await taken.sandbox.detach()
        taken = await later.adopt(box)
        await taken.wait_connected()
        assert await taken.sandbox.exit() is None


# what is there


async def test_the_list_tells_what_is_there_and_nothing_of_others(bench: Bench) -> None:
    expires = 1_900_000_000.5
    running = await bench.connected(epoch=7, owner='wren \n"é', expires_at=expires)
    frozen = await bench.connected()
    ended = await bench.connected()
    assert (await bench.found()).keys() == {running.kernel_id, frozen.kernel_id, ended.kernel_id}
    await frozen.sandbox.freeze()
    with contextlib.suppress(LinkClosed):
        await ended.link.command("end")
    await ended.ended()
    async with gateway(bench.place) as other:
        await other.connected()
        found = await bench.found()
        assert found[running.kernel_id] == FoundSandbox(running.kernel_id, True, False, 7, 'wren \n"é', expires)
        assert found[frozen.kernel_id] == FoundSandbox(frozen.kernel_id, True, frozen=True)
        assert found[ended.kernel_id] == FoundSandbox(ended.kernel_id, False)
        assert len(found) == 3
        assert len(await other.engine.list()) == 1


async def test_what_nobody_stands_for_is_discarded(bench: Bench) -> None:
    boxes = [await bench.connected() for _ in range(4)]
    running, frozen, ended, kept = boxes
    await frozen.sandbox.freeze()
    with contextlib.suppress(LinkClosed):
        await ended.link.command("end")
    await ended.ended()
    for box in (running, frozen, ended):
        await box.sandbox.detach()
        await bench.engine.discard(box.kernel_id)
        await bench.engine.discard(box.kernel_id)
        assert (await box.ended()).removed
    assert await bench.boxes() == set(await bench.found()) == {kept.kernel_id}
    assert (await kept.link.command("list", path=""))["entries"] == []


async def test_what_is_not_ours_is_not_discarded(bench: Bench) -> None:
    async with gateway(bench.place) as other:
        neighbour = await other.connected()
        await bench.engine.discard(neighbour.kernel_id)
        await bench.engine.discard(new_id())
        for name in ("", "..", "../../etc", "/etc", ".", "a/b", "x" * 300, "\0", "-", "é"):
            await bench.engine.discard(name)
        assert await neighbour.sandbox.exit() is None
        assert (await neighbour.link.command("list", path=""))["entries"] == []


async def test_a_directory_without_a_container_is_found_and_discarded(bench: Bench) -> None:
    box = await bench.connected()
    await box.sandbox.detach()
    await bench.place.remove_from_outside(box.sandbox)
    left = len(bench.place.leftovers())
    assert [(found.kernel_id, found.running) for found in await bench.engine.list()] == [(box.kernel_id, False)] * left
    await bench.engine.discard(box.kernel_id)
    assert bench.place.leftovers() == []
    assert await bench.engine.list() == []


@labelling
async def test_strange_containers_with_our_label_are_found_and_discarded(bench: Bench) -> None:
    """Of an older version, or made by somebody who wants to see what we do with it."""
    place = bench.place
    assert isinstance(place, DockerYard)
    old, odd = new_id(), new_id()
    await place.make_strange(bench.id, f"cellgate-{old}", {"kernel": old})
    await place.make_strange(
        bench.id, f"cellgate-{odd}", {"kernel": odd, "epoch": "-1e9", "owner": "", "expires": "9999999-12-31T25:00:00Z"}
    )
    for label in ({}, {"kernel": ""}, {"kernel": "../../../etc"}, {"kernel": old}, {"kernel": "x" * 64}):
        await place.make_strange(bench.id, f"strange-{new_id()}", label)
    found = await bench.found()
    assert len(found) == 7
    assert found[old] == FoundSandbox(old, running=False)
    assert found[odd] == FoundSandbox(odd, running=False)
    async with gateway(place) as other:
        for kernel_id in found:
            await other.engine.discard(kernel_id)
    assert (await bench.found()).keys() == found.keys()
    for kernel_id in found:
        await bench.engine.discard(kernel_id)
    assert await bench.found() == {}


@labelling
async def test_labels_say_whose_it_is(bench: Bench) -> None:
    assert isinstance(bench.place, DockerYard)
    box = await bench.create(epoch=3, owner="robin", expires_at=1_900_000_000.25)
    labels = await bench.place.labels(box.sandbox)
    assert {name: value for name, value in labels.items() if name in OUR_LABELS} == {
        "org.cellgate.gateway": bench.id,
        "org.cellgate.kernel": box.kernel_id,
        "org.cellgate.epoch": "3",
        "org.cellgate.owner": "robin",
        "org.cellgate.expires": "2030-03-17T17:46:40.250Z",
    }
