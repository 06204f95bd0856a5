"""F06: two gateways on one state directory. The second one waits or refuses; one that was taken for dead stops by itself."""

import time

import anyio
import httpx2
import pytest

from gateway.store.sqlite import SqliteStore
from tests.faults.test_gateway_death import Mortal, read_on, so_far, state, submit, until, whole
from tests.support import eventually, printed

pytestmark = pytest.mark.timeout(300)

_COUNTS = "import time\nfor number in range({most}): print(number, flush=True); time.sleep(0.05)\ntreasure = 42"


def counted(most: int) -> str:
    return "".join(f"{number}\n" for number in range(most))


def test_a_second_one_is_refused_and_harms_nobody() -> None:
    with Mortal() as first:
        kernel = first.kernel()
        running = submit(kernel, _COUNTS.format(most=60))
        until(kernel, running, "stream")
        second = Mortal(first.directory)
        second.launch()
        code, text = second.word()
        second.wait()
        assert code == "configuration_error"
        assert f"process {first.pid}" in text, text
        assert "lock_wait" in text
        second.launch(store={"lock_wait": 1.0})
        assert second.word()[0] == "configuration_error"
        second.close()
        assert printed(whole(read_on(kernel, running))) == counted(60)
        assert kernel.value("treasure") == "42"


def test_one_on_standby_takes_over() -> None:
    with Mortal() as first:
        kernel, idle = first.kernel(), first.kernel()
        idle.run("treasure = 43")
        running = submit(kernel, _COUNTS.format(most=200))
        until(kernel, running, "stream")
        second = Mortal(first.directory, store={"lock_wait": 120.0})
        try:
            second.launch()
            time.sleep(2)
            assert second._ready.empty()
            seen = so_far(kernel, running)
            first.kill()
            kind, url = second.word()
            assert kind == "url", url
            # `first` looks through its own settings; only the address is another.
            first.port = second.port = int(url.rpartition(":")[2])
            second.gateway = type(first.gateway)(url, second.settings)
            with second.gateway.http:
                kernel, idle = second.kernel(kernel), second.kernel(idle)
                events = whole(read_on(kernel, running))
                assert events[: len(seen)] == seen
                assert printed(events) == counted(200)
                assert (kernel.value("treasure"), idle.value("treasure")) == ("42", "43")
                assert set(second.kernels()) == {kernel.id, idle.id}
        finally:
            second.close()


async def _raise_epoch(store: SqliteStore) -> None:
    await store.open()
    await store.aclose()


@pytest.mark.parametrize("on_shutdown", ["detach", "stop"])
def test_one_that_was_replaced_stops_by_itself(on_shutdown: str) -> None:
    """As when its machine stood still, and the other one got the lock: whatever it was told to do at its end, the kernels are not
    its own any more."""
    with Mortal(server={"on_shutdown": on_shutdown}) as mortal:
        kernel, idle = mortal.kernel(), mortal.kernel()
        idle.run("treasure = 43")
        running = submit(kernel, _COUNTS.format(most=200))
        until(kernel, running, "stream")
        anyio.run(_raise_epoch, SqliteStore(mortal.directory / "store.sqlite3"))
        mortal.wait()
        assert mortal.containers() == sorted([kernel.id, idle.id])
        mortal.start()
        kernel, idle = mortal.kernel(kernel), mortal.kernel(idle)
        assert printed(whole(read_on(kernel, running))) == counted(200)
        assert (kernel.value("treasure"), idle.value("treasure")) == ("42", "43")


def test_one_that_was_replaced_takes_nothing_more() -> None:
    """It notices at its next commit at the latest: that one is not told as done."""
    with Mortal() as mortal:
        kernel = mortal.kernel()
        state(kernel, "idle")
        anyio.run(_raise_epoch, SqliteStore(mortal.directory / "store.sqlite3"))
        try:
            answer = kernel.post("open('ran', 'w'); 1", detach=True)
        except httpx2.TransportError:
            answer = None
        assert answer is None or answer.status_code == 503, answer.text
        mortal.wait()
        mortal.start()
        kernel = mortal.kernel(kernel)
        assert kernel.http.get(f"{kernel.path}/executions").json()["executions"] == []
        eventually(lambda: kernel.document()["state"] == "idle", "idle")
        assert kernel.value("__import__('os').path.exists('ran')") == "False"
