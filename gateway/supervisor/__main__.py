"""``python -m cellgate_supervisor --link PATH | --stdio``: the first process of a sandbox after init."""

import argparse
import ctypes
import os
import sys

from .linkend import LinkEnd
from .relay import Relay

_PR_SET_DUMPABLE = 4


def _hide_memory() -> None:
    """Cells run as the same user; they must not read this process's memory (the link's secret) through /proc."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="supervisor")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--link", metavar="PATH", help="the gateway's listening Unix socket")
    way.add_argument("--stdio", action="store_true", help="the link is this process's stdin and stdout")
    parser.add_argument("--work", default=os.getcwd(), help="the work directory (default: the current one)")
    arguments = parser.parse_args()
    if os.getuid() == 0 or os.getppid() != 1:
        # Ending a kernel means SIGKILL to every process in sight (see process.kill): never outside of a sandbox.
        parser.exit(2, "The supervisor runs only as init's child in a sandbox, and never as root.\n")
    _hide_memory()
    return Relay(LinkEnd(arguments.link), arguments.work).run()


if __name__ == "__main__":
    sys.exit(main())
