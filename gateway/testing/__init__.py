"""Public fakes: kernels and sandboxes without Docker, for the tests of the gateway and of what others build on it.

`FakeEngine` stands in for the Docker engine. Everything above the engine is the real thing: the frames codec, `Connection` and
`Link` over a real Unix socket, signed Jupyter messages. Only the box is scripted: a `ScriptedSupervisor` with a `ScriptedKernel`
that does in each cell what a table or a function says.

    engine = FakeEngine(KernelScript(cells={"1 + 1": [result("2")], "stuck": [Sleep(math.inf)]}))
    app = create_app(settings, engine)

Boxes are on a `FakeHost`, which outlives its engines: a second engine with the same `host` and `gateway_id` finds and adopts what
the first has left, whether that let go of it (`detach`) or was killed (`FakeSandbox.abandon`).

Cells that the table does not know end well and put nothing out. All of it lives in the event loop that `create` is called in;
none of its methods may be called from another thread. Archives of whole directories (`pack`, `unpack`) are not played.
"""

from gateway.testing.engine import FakeEngine, FakeHost, FakeSandbox
from gateway.testing.files import MemoryFiles
from gateway.testing.kernel import (
    Ask,
    Die,
    Emit,
    KernelScript,
    Oversize,
    Raise,
    ScriptedKernel,
    Sleep,
    Step,
    Steps,
    display,
    printed,
    result,
)
from gateway.testing.supervisor import ScriptedSupervisor

__all__ = [
    "Ask",
    "Die",
    "Emit",
    "FakeEngine",
    "FakeHost",
    "FakeSandbox",
    "KernelScript",
    "MemoryFiles",
    "Oversize",
    "Raise",
    "ScriptedKernel",
    "ScriptedSupervisor",
    "Sleep",
    "Step",
    "Steps",
    "display",
    "printed",
    "result",
]
