"""The container body, field by field against a golden file: no change of the lock-down goes in without being looked at.

After a change that is meant: ``.venv/bin/python -m tests.unit.test_lockdown`` writes the file anew.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.sandboxes.base import FoundSandbox, Limits, SandboxSpec
from gateway.sandboxes.lockdown import container_body, found

GOLDEN = Path(__file__).parent / "golden" / "container_body.json"
MIB = 1 << 20
SPEC = SandboxSpec(
    kernel_id="0f1e2d3c",
    image="cellgate-kernel:latest",
    limits=Limits(memory=1024 * MIB, cpus=1.5, pids=128),
    work_size=256 * MIB,
    tmp_size=128 * MIB,
    shm_size=64 * MIB,
    epoch=7,
    owner="wren",
    expires_at=1_900_000_000.0,
)


def bodies() -> dict[str, Any]:
    """One body for each way of the link."""
    common: dict[str, Any] = {"gateway_id": "gateway", "runtime": "runc", "seccomp": "{...}"}
    return {
        "socket": container_body(SPEC, link_directory=Path("/state/links/0f1e2d3c"), **common),
        "stdio": container_body(SPEC, link_directory=None, extra_security=("apparmor=docker-default",), **common),
    }


def test_the_body_is_the_golden_one() -> None:
    assert bodies() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("way", ["socket", "stdio"])
def test_what_must_never_be_otherwise(way: str) -> None:
    """Said here in plain words too, so that nobody can change it by writing the golden file anew."""
    body = bodies()[way]
    host = body["HostConfig"]
    assert body["NetworkDisabled"] is True
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert "seccomp={...}" in host["SecurityOpt"]
    assert not body["User"].startswith(("0", "root"))
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert host["NanoCpus"] == 1_500_000_000
    assert host["IpcMode"] == host["CgroupnsMode"] == "private"
    assert "Binds" not in host
    assert "Devices" not in host
    assert "PidMode" not in host
    assert all("noexec" in options and "nosuid" in options for options in host["Tmpfs"].values())
    assert all(mount["ReadOnly"] is True for mount in host["Mounts"])
    assert len(host["Mounts"]) == (1 if way == "socket" else 0)
    assert host["Init"] is True
    assert host["RestartPolicy"] == {"Name": "no"}


def test_the_two_ways_differ_in_the_link_alone() -> None:
    socket, stdio = bodies()["socket"], bodies()["stdio"]
    assert {key for key in socket if socket[key] != stdio[key]} == {
        "Cmd",
        "OpenStdin",
        "StdinOnce",
        "AttachStdin",
        "AttachStdout",
        "HostConfig",
    }
    assert {key for key in socket["HostConfig"] if socket["HostConfig"][key] != stdio["HostConfig"][key]} == {
        "Mounts",
        "SecurityOpt",
    }


def test_what_the_labels_say_is_read_back() -> None:
    for spec in (
        SPEC,
        replace(SPEC, owner='"\n\0é,=', epoch=0),
        replace(SPEC, expires_at=0.0),
        replace(SPEC, expires_at=1_900_000_000.125),
    ):
        labels = container_body(spec, gateway_id="g", runtime="runc", seccomp="", link_directory=None)["Labels"]
        assert found("k", True, labels) == FoundSandbox("k", True, False, spec.epoch, spec.owner, spec.expires_at)


def test_a_lifetime_without_an_end_has_a_label_too() -> None:
    spec = replace(SPEC, expires_at=math.inf)
    labels = container_body(spec, gateway_id="g", runtime="runc", seccomp="", link_directory=None)["Labels"]
    assert labels["org.cellgate.expires"] == "9999-12-31T23:59:59.000Z"
    assert found("k", True, labels).expires_at > 2e11


@pytest.mark.parametrize("epoch", ["", "-1", "1e3", "x", "9" * 5000, "٣", " 1"])
@pytest.mark.parametrize(
    "expires", ["", "Z", "soon", "2030-01-01", "2030-01-01T00:00:00+01:00", "99999-01-01T00:00:00Z", "9" * 5000]
)
def test_labels_that_make_no_sense_say_nothing(epoch: str, expires: str) -> None:
    assert found("k", False, {"org.cellgate.epoch": epoch, "org.cellgate.expires": expires}) == FoundSandbox("k", False)
    assert found("k", False, {}) == FoundSandbox("k", False)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(bodies(), indent=2) + "\n")
