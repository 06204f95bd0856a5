"""What a Docker daemon says about itself, judged: on answers of real daemons, and with one thing wrong at a time."""

from typing import Any

import pytest

from gateway.sandboxes import docker_check
from gateway.sandboxes.base import EngineReport, Finding
from gateway.sandboxes.image import CONTENT_HASH, ROOT, content_hash
from gateway.settings import MIB, load

VERSION = {"Version": "29.1.1", "ApiVersion": "1.52", "MinAPIVersion": "1.44"}
INFO: dict[str, Any] = {
    "Runtimes": {"io.containerd.runc.v2": {"path": "runc"}, "runc": {"path": "runc"}},
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
    "MemTotal": 64 * 1024 * MIB,
    "LiveRestoreEnabled": True,
    "OperatingSystem": "Debian GNU/Linux 12 (bookworm)",
}
IMAGE = {"Size": 1000 * MIB, "Config": {"Labels": {CONTENT_HASH: content_hash(ROOT)}}}
NAME = "cellgate-kernel:latest"


def report(
    version: dict[str, Any] | None = None, image: dict[str, Any] | None = IMAGE, runtime: str = "runc", **info: Any
) -> EngineReport:
    settings = load(docker={"runtime": runtime})
    return docker_check.report(settings, "unix:///x", version or VERSION, {**INFO, **info}, {NAME: image})


def finding(found: EngineReport, subject: str) -> Finding:
    (one,) = [finding for finding in found.findings if finding.subject == subject]
    return one


def test_a_good_daemon_has_no_problem() -> None:
    found = report()
    assert found.problems == []
    assert {finding.level for finding in found.findings} == {"ok"}
    assert (found.engine, found.version, found.api_version, found.runtime) == ("docker", "29.1.1", "1.52", "runc")
    assert found.memory == 64 * 1024 * MIB
    assert finding(found, f"image {NAME}").text == "1000 MiB, current"


@pytest.mark.parametrize(
    ("api", "level"), [("1.39", "problem"), ("1.9", "problem"), ("1.40", "ok"), ("1.52", "ok"), ("2.0", "ok"), ("", "problem")]
)
def test_the_version_of_the_api(api: str, level: str) -> None:
    assert finding(report({"Version": "x", "ApiVersion": api}), "engine").level == level


@pytest.mark.parametrize("runtimes", [None, {}, {"runsc": {}}])
def test_a_runtime_that_is_not_there(runtimes: Any) -> None:
    problem = finding(report(Runtimes=runtimes), "runtime")
    assert problem.level == "problem"
    assert "'runc'" in problem.text
    assert problem.remedy
    assert finding(report(runtime="runsc", Runtimes={"runsc": {}}), "runtime").level == "ok"


@pytest.mark.parametrize("options", [None, [], ["name=apparmor"]])
def test_a_daemon_without_seccomp(options: Any) -> None:
    assert finding(report(SecurityOptions=options), "seccomp").level == "problem"


@pytest.mark.parametrize(
    ("image", "level", "text"),
    [
        (None, "problem", "not on the engine"),
        ({"Size": 5 * MIB, "Config": {"Labels": {CONTENT_HASH: "0" * 16}}}, "warning", "built from other sources"),
        ({"Size": 5 * MIB, "Config": {"Labels": None}}, "ok", "5 MiB, not built by scripts/image"),
        ({"Size": 5 * MIB, "Config": None}, "ok", "not built by"),
        ({}, "ok", "0 MiB"),
    ],
)
def test_the_image(image: dict[str, Any] | None, level: str, text: str) -> None:
    found = finding(report(image=image), f"image {NAME}")
    assert found.level == level
    assert text in found.text
    assert bool(found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("total", "level"), [(0, "ok"), (None, "ok"), (100 * MIB, "problem"), (1024 * MIB, "ok"), (1 << 40, "ok")]
)
def test_memory_for_at_least_one_kernel(total: int | None, level: str) -> None:
    assert finding(report(MemTotal=total), "memory").level == level


def test_the_room_is_told_in_kernels() -> None:
    # 10 GiB promised one and a half times, for kernels of 1 GiB; and never more than may run.
    assert "room for 15 kernels of 1024 MiB" in finding(report(MemTotal=10 * 1024 * MIB), "memory").text
    assert "room for 32 kernels" in finding(report(MemTotal=1 << 40), "memory").text


@pytest.mark.parametrize("enabled", [False, None])
def test_live_restore_is_only_advice(enabled: bool | None) -> None:
    found = finding(report(LiveRestoreEnabled=enabled), "live-restore")
    assert (found.level, bool(found.remedy)) == ("warning", True)
    assert report(LiveRestoreEnabled=enabled).problems == []
    assert "ends every kernel at once" in found.text
    assert "when it comes back" in found.text


def test_what_live_restore_is_good_for() -> None:
    found = finding(report(LiveRestoreEnabled=True), "live-restore")
    assert found.level == "ok"
    assert "running cells go on" in found.text


def test_a_daemon_that_says_nothing() -> None:
    found = docker_check.report(load(), "unix:///x", {}, {}, {})
    assert {problem.subject for problem in found.problems} == {"engine", "runtime", "seccomp"}
    assert (found.version, found.memory) == ("unknown", 0)


@pytest.mark.parametrize(
    ("url", "system", "shares"),
    [
        ("unix:///var/run/docker.sock", "Debian GNU/Linux 12", True),
        ("unix:///var/run/docker.sock", "", True),
        ("unix:///home/me/.docker/desktop/docker.sock", "Docker Desktop", False),
        ("tcp://10.0.0.1:2376", "Debian GNU/Linux 12", False),
        ("ssh://me@host", "Debian GNU/Linux 12", False),
    ],
)
def test_whether_a_path_of_this_host_can_be_mounted(url: str, system: str, shares: bool) -> None:
    assert docker_check.shares_paths(url, {"OperatingSystem": system}) is shares


def test_apparmor_is_asked_for_where_it_is() -> None:
    assert docker_check.security_options(INFO) == ("apparmor=docker-default",)
    assert docker_check.security_options({"SecurityOptions": ["name=seccomp"]}) == ()
    assert docker_check.security_options({}) == ()
