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
from gateway.sandboxes.base import Limits, Sandbox, SandboxEngine, SandboxExit, SandboxSpec
from gateway.sandboxes.link import Link
from gateway.settings import MIB, LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame, Kind
from tests.contract.engines import YARDS, Yard, new_id, yard

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PATIENCE = 60.0
IMAGE = "cellgate-kernel:latest"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=YARDS)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Yard]:
    async with yard(request.param) as found:
        yield found


class Bench:
    """One engine of one gateway; every box that it makes is removed at the end."""

    def __init__(self, place: Yard, gateway_id: str) -> None:
        self.place, self.id = place, gateway_id
        self.engine: SandboxEngine = place.engine(gateway_id)
        self.made: list[Box] = []

    async def create(self, lifetime: float = 600.0, silence: float = 60.0, image: str = IMAGE) -> "Box":
        box = Box(lifetime, silence)
        spec = SandboxSpec(box.kernel_id, image, Limits(512 * MIB, 1.0, 64), 32 * MIB, 32 * MIB, 16 * MIB)
        box.sandbox = await self.engine.create(spec, box.make_link)
        self.made.append(box)
        return box

    async def connected(self, **terms: Any) -> "Box":
        box = await self.create(**terms)
        await box.wait_connected()
        return box

    async def boxes(self) -> set[str]:
        return await self.place.boxes(self.id)


class Box:
    """A sandbox as the kernels room would hold it: its link, and what has come over it."""

    sandbox: Sandbox

    def __init__(self, lifetime: float, silence: float) -> None:
        self.kernel_id = new_id()
        self.frames: list[Frame] = []
        self.client: KernelClient | None = None
        self._terms = lifetime, silence

    def make_link(self) -> Link:
        self.link = Link(LinkSettings(command_timeout=20.0), self._take, *self._terms)
        return self.link

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
            await bench.engine.sweep()
            await bench.engine.aclose()
    assert left == set()
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
        engine.sweep,
        lambda: engine.create(spec, Box(1.0, 1.0).make_link),
    ]
    for call in calls:
        with pytest.raises(EngineUnavailable) as error:
            await call()
        assert isinstance(error.value, GatewayError)
        assert error.value.retryable
    await engine.aclose()
    assert place.leftovers() == []


# sweeping


async def test_a_sweep_removes_what_an_earlier_gateway_of_the_same_identity_has_left(place: Yard) -> None:
    async with gateway(place) as other:
        neighbour = await other.connected()
        gateway_id = new_id()
        earlier = Bench(place, gateway_id)
        await earlier.engine.check()
        left = [await earlier.connected() for _ in range(2)]
        await left[0].link.command("end")
        await left[0].ended()
        await earlier.engine.aclose()

        later = Bench(place, gateway_id)
        await later.engine.check()
        assert await later.boxes() == {box.kernel_id for box in left}
        assert await later.engine.sweep() == 2
        assert await later.boxes() == set()
        assert await later.engine.sweep() == 0
        assert await neighbour.sandbox.exit() is None
        assert (await neighbour.link.command("list", path=""))["entries"] == []
        # The earlier gateway's own objects, which a killed one would not have had to put away.
        for box in left:
            await box.sandbox.remove()
        await earlier.engine.aclose()
        await later.engine.aclose()
