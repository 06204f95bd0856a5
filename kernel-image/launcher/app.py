"""The kernel application: ipykernel's, with sockets that do not drop and the parts of this package put in."""

import faulthandler
import os
import sys
import traceback
from typing import Any

import zmq
from ipykernel import kernelapp
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import IPKernelApp
from traitlets.config import Config

from . import debugger, variables

# Messages queued in ZMQ for a reader that stalls. Few, because one may be megabytes and they count toward the
# sandbox's memory; the rest waits in the cell.
QUEUED_OUTPUTS = 100
EXIT_OUTPUT = 70


def settings() -> Config:
    """ipykernel's options that differ from its defaults."""
    config = Config()
    config.IPKernelApp.outstream_class = "cellgate_kernel.streams.PatientStream"
    config.Session.packer = "cellgate_kernel.packing.pack"
    # No history file and no thread that writes it; In, Out and _ do not need it.
    config.HistoryManager.enabled = False
    # What init's children say of their parent: no parent to watch, and no advice on the terminal about Ctrl-C.
    config.IPKernelApp.parent_handle = 1
    return config


class Forgetful(dict[Any, Any]):
    """A dictionary that keeps nothing, but hands out lists to append to."""

    def __missing__(self, key: Any) -> list[Any]:
        return []

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The default, which is not kept either."""
        return default


class VitalThread(IOPubThread):
    """The thread that sends outputs. A kernel without it answers nothing and waits for ever, so they end together.

    It ends when no descriptor is left that its event loop could use: a cell can bring that about.
    """

    def _thread_main(self) -> None:
        try:
            super()._thread_main()
        except BaseException:  # noqa: BLE001 - whatever it was, it is told and it is the end
            last_words(traceback.format_exc())
        if not self._stopped:
            last_words("The thread that sends outputs has ended, and with it the kernel.\n")
            os._exit(EXIT_OUTPUT)

    def stop(self) -> None:
        """End it on purpose."""
        self._stopped = True
        super().stop()


def last_words(text: str) -> None:
    """Past the cell's stderr, which is caught, to the process's own."""
    os.write(getattr(sys.stderr, "_original_stdstream_copy", 2), text.encode())


class KernelApp(IPKernelApp):
    """An ipykernel that would rather wait than lose an output."""

    def init_iopub(self, context: Any) -> None:
        """Make the output thread ours."""
        kernelapp.IOPubThread = VitalThread  # type: ignore[misc]
        super().init_iopub(context)

    def _bind_socket(self, s: zmq.Socket[Any], port: int) -> Any:
        # The one place between the making of the iopub socket and its use by another thread.
        if s.type == zmq.XPUB:
            s.setsockopt(zmq.XPUB_NODROP, 1)
            s.setsockopt(zmq.SNDHWM, QUEUED_OUTPUTS)
        return super()._bind_socket(s, port)

    def init_kernel(self) -> None:
        """Make the kernel, with the debugger still asleep."""
        debugger.install()
        super().init_kernel()
        # IPython keeps a copy of every output and traceback for its %notebook magic: a kernel that has printed as much
        # as its memory limit, in all its life, would be killed for it.
        history = self.kernel.shell.history_manager
        history.outputs, history.exceptions = Forgetful(), Forgetful()
        variables.install(self.kernel)

    def init_path(self) -> None:
        """Let cells import from the work directory, after the standard library."""
        # Python's -P keeps it out until here, so that no file in it can stop the kernel from starting again.
        here = next(i for i, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
        sys.path.insert(here, "")

    def patch_io(self) -> None:
        """Let a crash in native code leave its Python traceback on the process's own stderr."""
        super().patch_io()
        faulthandler.enable(file=sys.stderr._original_stdstream_copy)  # type: ignore[union-attr]
