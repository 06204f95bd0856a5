"""The same product where no path of this host can be shared with the sandbox: the link is the container's own stdin and stdout."""

import os
from collections.abc import Iterator

import pytest

from tests.support import Gateway, Kernel, engine, printed, running, stdout


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running(docker={"link": "stdio"}) as started:
        yield started


@pytest.fixture
def kernel(gateway: Gateway) -> Iterator[Kernel]:
    with gateway.kernel() as started:
        yield started


def test_the_sandbox_shares_no_path_with_the_host(kernel: Kernel) -> None:
    api = engine()
    found = api.inspect_container(kernel.container)
    api.close()
    assert found["Mounts"] == [] or {mount["Type"] for mount in found["Mounts"]} == {"tmpfs"}
    assert kernel.run("import os\nprint(os.path.exists('/run/cellgate/link.sock'))") == "False\n"


def test_cells_keep_their_variables(kernel: Kernel) -> None:
    kernel.run("numbers = []")
    for number in range(20):
        kernel.run(f"numbers.append({number})")
    assert kernel.value("sum(numbers)") == "190"
    assert kernel.execute("1 / 0")["outputs"][-1]["ename"] == "ZeroDivisionError"


def test_large_outputs_arrive_whole(kernel: Kernel) -> None:
    assert stdout(kernel.execute("print('x' * 5_000_000, end='')")) == "x" * 5_000_000
    events = kernel.events("for n in range(5_000): print(n, flush=True)")
    assert printed(events) == "".join(f"{n}\n" for n in range(5_000))


def test_what_a_cell_writes_to_the_descriptors_does_not_break_the_link(kernel: Kernel) -> None:
    # 1 and 2 of the kernel process are not those of the supervisor, which are the link.
    code = "import os\nfor n in range(1000): os.write(1, b'\\x00\\xffnoise\\n'); os.write(2, bytes(range(256)))"
    assert kernel.execute(code)["status"] == "ok"
    assert kernel.value("6 * 7") == "42"


def test_files_go_in_and_out(kernel: Kernel) -> None:
    content = os.urandom(1_000_000) * 30
    assert kernel.http.put(kernel.file("d/big"), content=content).status_code == 201
    assert kernel.http.get(kernel.file("d/big")).content == content
    assert kernel.run("import os\nprint(os.path.getsize('d/big'))") == "30000000\n"


def test_interrupt_restart_and_crash(kernel: Kernel) -> None:
    kernel.run("kept = 1\nopen('file', 'w').write('kept')")
    with kernel.submitted("print('in', flush=True)\nwhile True: pass") as cell:
        cell.wait_for("stream")
        kernel.interrupt()
        assert cell.end()["cause"]["code"] == "interrupted"
    assert kernel.value("kept") == "1"
    result = kernel.execute("import os\nos._exit(3)")
    assert (result["status"], result["cause"]["exit_code"], kernel.document()["state"]) == ("died", 3, "dead")
    assert kernel.restart()["state"] == "idle"
    assert kernel.value("'kept' in globals(), open('file').read()") == "(False, 'kept')"


def test_input(kernel: Kernel) -> None:
    with kernel.submitted("print(input('? '))") as cell:
        cell.answer("yes")
        cell.end()
        assert printed(cell.events) == "yes\n"


def test_a_removed_container_is_noticed(kernel: Kernel) -> None:
    api = engine()
    with kernel.submitted("print('in', flush=True)\nwhile True: pass") as cell:
        cell.wait_for("stream")
        api.remove_container(kernel.container, force=True)
        ended = cell.end()
    api.close()
    assert (ended["status"], ended["variables"]) == ("died", "lost")
    assert ended["cause"]["code"] in ("sandbox_removed", "sandbox_ended")
    assert kernel.http.post(f"{kernel.path}/restart").json()["code"] in ("kernel_dead", "kernel_gone")
