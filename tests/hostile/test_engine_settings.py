"""What the engine was told: a running container's settings are the profile, and no request can add a word to them.

`test_lockdown.py` looks from inside; this looks from the engine's side, where also that shows which no cell can see.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from gateway.sandboxes.base import Limits, SandboxSpec
from gateway.sandboxes.image import ROOT, source_files
from gateway.sandboxes.lockdown import LABEL, container_body
from gateway.settings import KernelSpecSettings
from tests.support import Gateway, Kernel, engine, problem

SPEC = KernelSpecSettings()


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    with contextlib.closing(engine()) as client:
        yield client


def expected_body(gateway: Gateway, kernel: Kernel, limits: Limits) -> dict[str, Any]:
    spec = SandboxSpec(
        kernel_id=kernel.id,
        image=SPEC.image,
        limits=limits,
        work_size=SPEC.work_size,
        tmp_size=SPEC.tmp_size,
        shm_size=SPEC.shm_size,
    )
    return container_body(
        spec,
        gateway_id=gateway.id,
        runtime="runc",
        seccomp=source_files(ROOT)["kernel-image/seccomp.json"].read_text(),
        link_directory=gateway.settings.state_dir / "links" / kernel.id,
    )


def without_apparmor(options: list[str]) -> list[str]:
    # There only where the host has AppArmor.
    return [option for option in options if option != "apparmor=docker-default"]


def normal(name: str, value: Any) -> Any:
    if name == "SecurityOpt":
        return [json.loads(o.removeprefix("seccomp=")) if o.startswith("seccomp=") else o for o in without_apparmor(value)]
    if name == "RestartPolicy":
        return value["Name"]
    if name == "Ulimits":
        return sorted(value, key=lambda limit: str(limit["Name"]))
    return value or None


def test_a_running_container_is_what_the_profile_says(gateway: Gateway, shared: Kernel, api: docker.APIClient) -> None:
    found = api.inspect_container(shared.container)
    body = expected_body(gateway, shared, Limits(SPEC.limits.memory, SPEC.limits.cpus, SPEC.limits.pids))
    host = body.pop("HostConfig")
    body.pop("Env"), body.pop("NetworkDisabled"), body.pop("Labels")
    for name, value in host.items():
        assert normal(name, found["HostConfig"][name]) == normal(name, value), name
    for name, value in body.items():
        assert found["Config"][name] == value, name
    assert found["State"]["Running"] is True


NEVER = (
    "Binds",
    "Devices",
    "DeviceRequests",
    "DeviceCgroupRules",
    "VolumesFrom",
    "Links",
    "PortBindings",
    "ExtraHosts",
    "GroupAdd",
    "Sysctls",
    "CapAdd",
    "Dns",
    "DnsOptions",
    "DnsSearch",
    "StorageOpt",
    "CgroupParent",
    "PidMode",
    "UTSMode",
    "UsernsMode",
    "Cgroup",
    "VolumeDriver",
)


def test_what_is_never_asked_for_is_not_there(shared: Kernel, api: docker.APIClient) -> None:
    found = api.inspect_container(shared.container)
    host = found["HostConfig"]
    assert {name: host.get(name) for name in NEVER if host.get(name)} == {}
    assert (host["Privileged"], host["PublishAllPorts"], host["AutoRemove"]) == (False, False, False)
    assert found["NetworkSettings"]["Ports"] == {}
    assert set(found["NetworkSettings"]["Networks"]) <= {"none"}
    assert found["Config"].get("ExposedPorts") is None
    assert found["Config"].get("Volumes") is None


def test_one_directory_is_shared_and_read_only(gateway: Gateway, shared: Kernel, api: docker.APIClient) -> None:
    mounts = [mount for mount in api.inspect_container(shared.container)["Mounts"] if mount["Type"] != "tmpfs"]
    assert [(mount["Type"], mount["Destination"], mount["RW"]) for mount in mounts] == [("bind", "/run/cellgate", False)]
    directory = gateway.settings.state_dir / "links" / shared.id
    assert mounts[0]["Source"] == str(directory)
    assert [entry.name for entry in directory.iterdir()] == ["link.sock"]
    # Other users of this host can't get to it.
    assert directory.parent.stat().st_mode & 0o077 == 0


def test_nothing_the_engine_stores_is_secret(gateway: Gateway, api: docker.APIClient) -> None:
    with gateway.kernel(env={"SECRET": "value-of-the-secret"}, label="label of the client") as kernel:
        assert kernel.run("import os\nprint(os.environ['SECRET'])") == "value-of-the-secret\n"
        found = api.inspect_container(kernel.container)
        image = api.inspect_image(found["Image"])  # type: ignore[no-untyped-call]
        text = json.dumps(found)
    assert gateway.token not in text
    assert "value-of-the-secret" not in text
    assert "label of the client" not in text
    assert sorted(found["Config"]["Env"]) == sorted([*image["Config"]["Env"], "CELLGATE_CPUS=1"])
    own = {name: value for name, value in found["Config"]["Labels"].items() if name not in (image["Config"]["Labels"] or {})}
    expires = own.pop(f"{LABEL}expires")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", expires)
    ours = {"gateway": gateway.id, "kernel": kernel.id, "epoch": "1", "owner": ""}
    assert own == {f"{LABEL}{name}": value for name, value in ours.items()}
    assert found["Args"] == ["-I", "-m", "cellgate_supervisor", "--link", "/run/cellgate/link.sock"]


ODD = "a\n--privileged\t\"'$(id)`id`;&|{{.Env}}\\ ✓ ../../etc label=org.cellgate.gateway=x"


def test_no_word_of_a_request_reaches_the_engine(gateway: Gateway, shared: Kernel, api: docker.APIClient) -> None:
    with gateway.kernel(label=ODD, env={"ODD": ODD, "HostConfig": "x"}) as kernel:
        assert kernel.document()["label"] == ODD
        assert kernel.run("import os\nprint(os.environ['ODD'] == " + repr(ODD) + ")") == "True\n"
        odd, plain = api.inspect_container(kernel.container), api.inspect_container(shared.container)
    for found, owner in ((odd, kernel), (plain, shared)):
        for name in ("kernel", "expires"):
            del found["Config"]["Labels"][f"{LABEL}{name}"]
        found["HostConfig"]["Mounts"] = json.loads(json.dumps(found["HostConfig"]["Mounts"]).replace(owner.id, "ID"))
    assert odd["HostConfig"] == plain["HostConfig"]
    assert odd["Config"] == plain["Config"]


def test_limits_are_the_only_thing_a_request_changes(gateway: Gateway, shared: Kernel, api: docker.APIClient) -> None:
    with gateway.kernel(limits={"memory": "512m", "cpus": 0.5, "pids": 64}) as kernel:
        found, plain = (
            api.inspect_container(kernel.container)["HostConfig"],
            api.inspect_container(shared.container)["HostConfig"],
        )
    changed = {name for name in found if found[name] != plain[name]} - {"Mounts"}
    assert changed == {"Memory", "MemorySwap", "NanoCpus", "PidsLimit"}
    assert (found["Memory"], found["MemorySwap"]) == (512 * 1024**2, 512 * 1024**2)
    assert (found["NanoCpus"], found["PidsLimit"]) == (500_000_000, 64)


FIELDS: list[dict[str, Any]] = [
    {"HostConfig": {"Privileged": True}},
    {"image": "alpine"},
    {"privileged": True},
    {"user": "root"},
    {"mounts": ["/:/host"]},
    {"volumes": {"/": "/host"}},
    {"network": "host"},
    {"command": ["sh"]},
    {"entrypoint": "sh"},
    {"runtime": "runc"},
    {"devices": ["/dev/sda"]},
    {"cap_add": ["SYS_ADMIN"]},
    {"security_opt": ["seccomp=unconfined"]},
    {"labels": {"org.cellgate.gateway": "x"}},
    {"name": "x"},
    {"id": "x"},
    {"work_dir": "/"},
    {"limits": {"devices": []}},
    {"limits": {"memory": "1g", "swap": "1g"}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_a_field_of_the_engine_is_no_field_of_a_request(gateway: Gateway, fields: dict[str, Any]) -> None:
    problem(gateway.http.post("/v1/kernels", json=fields), 422, "invalid_request")
