"""Finds the image that the kernel image is built on: at hand, pulled, or made here from Debian's packages.

The last is for machines that reach a Debian mirror and a package index but no image registry. It gives the same
distribution and the same Python as the default base, so that the same lock file and the same Dockerfile hold.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

DEFAULT = "python:3.11-slim-bookworm"
MADE_HERE = "cellgate-base:bookworm-py311"
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
MIRROR = "http://deb.debian.org/debian"

ANSWER_SECONDS = 20.0  # for a registry to say anything at all; a pull that has begun may take its time


class CannotBuildError(Exception):
    """Says what is in the way and what to do."""


def inspect(image: str) -> dict[str, Any] | None:
    """What the engine knows of an image; None if it has none of that name."""
    if not shutil.which("docker"):
        raise CannotBuildError("The `docker` command is not there: install Docker, or run scripts/setup as root.")
    answer = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        found: dict[str, Any] = json.loads(answer.stdout)[0]
        return found
    if "no such image" in answer.stderr.lower():
        return None
    raise CannotBuildError(f"Docker does not answer: {answer.stderr.strip()}")


def find(chosen: str | None) -> str:
    """The name of a base that the engine has; a base chosen by name is never replaced by another."""
    name = chosen or DEFAULT
    if inspect(name):
        return name
    if not chosen and inspect(MADE_HERE):
        print(f"Base: {MADE_HERE}, made here earlier.", flush=True)
        return MADE_HERE
    print(f"Base: pulling {name} ...", flush=True)
    failure = _pull(name)
    if failure is None:
        return name
    if chosen:
        raise CannotBuildError(f"{name} cannot be pulled: {failure}")
    print(f"  it cannot be pulled: {failure}", flush=True)
    _make()
    return MADE_HERE


def _pull(name: str) -> str | None:
    """None, or why not. The first line of output comes when the registry has answered."""
    process = subprocess.Popen(["docker", "pull", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    impatience = threading.Timer(ANSWER_SECONDS, process.kill)
    impatience.start()
    lines = []
    for line in process.stdout:
        impatience.cancel()
        lines.append(line.strip())
    impatience.cancel()
    if process.wait() == 0:
        return None
    return lines[-1] if lines else f"no answer within {ANSWER_SECONDS:.0f} s"


def _make() -> None:
    """Make the base with debootstrap and import it."""
    _need_debootstrap()
    mirror = _mirror()
    print(f"Base: making {MADE_HERE} from Debian's packages (debootstrap, {mirror}); about a minute ...", flush=True)
    # Not below /tmp, which may be mounted without devices or programs; in a mount namespace of its own, so that
    # a failure leaves no mounts behind.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellgate-base-") as root:
        made = subprocess.run(
            ["unshare", "--mount", "debootstrap", "--variant=minbase", "--force-check-gpg",
             f"--include={','.join(PACKAGES)}", SUITE, root, mirror],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise CannotBuildError(f"{(made.stdout + made.stderr)[-2000:]}\ndebootstrap failed; its last lines are above.")
        # debootstrap copies this machine's name and resolver; nobody else needs to know them.
        left_out = ("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*", "etc/hostname", "etc/resolv.conf")
        archive = ["tar", "-C", root, *(f"--exclude=./{name}" for name in left_out), "-c", "."]
        pipeline = f"{shlex.join(archive)} | docker import - {MADE_HERE}"
        if subprocess.run(["bash", "-o", "pipefail", "-c", pipeline], stdout=subprocess.DEVNULL, check=False).returncode:
            raise CannotBuildError(f"{MADE_HERE} was made but could not be imported.")


def _need_debootstrap() -> None:
    way_out = (
        f"Either make {DEFAULT} pullable (a registry mirror, `docker load`), "
        "or name another base with Debian 12 and Python 3.11: scripts/image --base NAME."
    )
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise CannotBuildError(f"Making a base from Debian's packages needs root and a Debian or Ubuntu. {way_out}")
    if shutil.which("debootstrap"):
        return
    if os.environ.get("CELLGATE_NO_INSTALL"):
        raise CannotBuildError(f"debootstrap is missing and CELLGATE_NO_INSTALL is set. {way_out}")
    print("Installing debootstrap (apt-get) ...", flush=True)
    for command in ("update", "install -y --no-install-recommends debootstrap debian-archive-keyring"):
        done = subprocess.run(["apt-get", "-q", *command.split()], capture_output=True, text=True, check=False)
    if not shutil.which("debootstrap"):
        raise CannotBuildError(f"{done.stderr.strip()}\ndebootstrap could not be installed. {way_out}")


def _mirror() -> str:
    """The mirror that this machine itself uses, if it is a Debian; both of apt's formats."""
    release = _text("/etc/os-release")
    codename = re.search(r"^VERSION_CODENAME=(\w+)", release, re.MULTILINE)
    if not codename or not re.search(r"^ID=debian$", release, re.MULTILINE):
        return MIRROR
    # Only the files of the distribution itself: others hold third parties' archives of the same suite.
    entries = _text("/etc/apt/sources.list").splitlines() + _text("/etc/apt/sources.list.d/debian.sources").split("\n\n")
    for entry in entries:
        words = " ".join(line for line in entry.splitlines() if not line.startswith("#")).split()
        addresses = [word.rstrip("/") for word in words if word.startswith(("http://", "https://"))]
        if addresses and codename[1] in words and "main" in words:
            return addresses[0]
    return MIRROR


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""
