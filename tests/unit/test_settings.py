"""The Settings tree: where values come from and which wins, what is refused, and that the refusal names the field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import ConfigurationError
from gateway.settings import MIB, Settings, load, parse_size


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what this machine's environment may say."""
    import os

    for name in list(os.environ):
        if name.startswith("CELLGATE_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("64k", 64 * 1024),
        ("512m", 512 * MIB),
        ("1g", 1024 * MIB),
        ("1.5g", 1536 * MIB),
        ("0.5m", MIB // 2),
        (" 2G ", 2048 * MIB),
        ("2GB", 2048 * MIB),
        ("2GiB", 2048 * MIB),
        ("3MiB", 3 * MIB),
        ("100b", 100),
        ("1e3", 1000),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "m", "g", "b", "ib", "1t", "much", "1 2", "m1", "1..5g", "nan", "inf", "1e400g", None, True, [], {}]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="a size is a number of bytes"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert isinstance(parse_size(text), int)
    except ValueError as error:
        assert "a size is" in str(error)  # noqa: PT017


def test_the_defaults_are_valid_and_local() -> None:
    settings = load()
    assert settings.server.host == "127.0.0.1"
    assert settings.auth == "token"
    assert settings.kernels.default_spec in settings.kernels.specs
    assert settings.kernels.specs["python3"].limits.memory == 1024 * MIB


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cellgate.toml"
    file.write_text(
        """
        log_level = "debug"
        [server]
        port = 9000
        allowed_origins = ["https://lab.example"]
        [kernels]
        max_kernels = 3
        [kernels.specs.python3]
        work_size = "64m"
        [kernels.specs.python3.limits]
        memory = "512m"
        [kernels.specs.small]
        image = "other:latest"
        limits = {memory = "256m", cpus = 0.5}
        """
    )
    settings = load(file)
    assert settings.log_level == "debug"
    assert settings.server.port == 9000
    assert settings.server.allowed_origins == ("https://lab.example",)
    assert settings.server.host == "127.0.0.1"
    assert settings.kernels.max_kernels == 3
    assert settings.kernels.specs["python3"].limits.memory == 512 * MIB
    assert settings.kernels.specs["python3"].work_size == 64 * MIB
    assert settings.kernels.specs["small"].image == "other:latest"
    assert settings.kernels.specs["small"].limits.cpus == 0.5


def test_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("CELLGATE_SERVER__PORT", "9001")
    environment.setenv("CELLGATE_LOG_FORMAT", "json")
    environment.setenv("CELLGATE_KERNELS__MAX_KERNELS", "7")
    environment.setenv("CELLGATE_SERVER__ALLOWED_HOSTS", '["a.example", "b.example"]')
    settings = load()
    assert settings.server.port == 9001
    assert settings.log_format == "json"
    assert settings.kernels.max_kernels == 7
    assert settings.server.allowed_hosts == ("a.example", "b.example")


def test_flags_beat_the_environment_and_that_beats_the_file(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('token = "from the file....."\n[server]\nport = 1001\nhost = "localhost"\nmax_body = 5\n')
    assert load(file).server.port == 1001
    environment.setenv("CELLGATE_SERVER__PORT", "1002")
    assert load(file).server.port == 1002
    settings = load(file, server={"port": 1003})
    # Level by level: what a stronger source does not name comes from a weaker one.
    assert (settings.server.port, settings.server.host, settings.server.max_body) == (1003, "localhost", 5)
    assert settings.token == "from the file....."


def test_the_file_is_named_by_the_environment_or_by_the_caller(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    for name, port in (("a.toml", 2001), ("b.toml", 2002)):
        (tmp_path / name).write_text(f"[server]\nport = {port}\n")
    environment.setenv("CELLGATE_CONFIG", str(tmp_path / "a.toml"))
    assert load().server.port == 2001
    assert load(tmp_path / "b.toml").server.port == 2002
    environment.setenv("CELLGATE_CONFIG", "")
    assert load().server.port == 8890


def test_one_file_leaves_nothing_behind_for_the_next_load(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 3001\n")
    assert load(file).server.port == 3001
    assert load().server.port == 8890
    file.write_text("[server]\nport = -1\n")
    with pytest.raises(ConfigurationError):
        load(file)
    assert load().server.port == 8890


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.toml does not exist"):
        load(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match="does not exist"):
        load(tmp_path)
    (tmp_path / "bad.toml").write_text("[server\n")
    with pytest.raises(ConfigurationError, match=r"bad\.toml is not TOML"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"token = '\xe9'"])
def test_a_file_that_is_not_utf8(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"bad\.toml is not TOML"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"server": {"port": 70000}}, "server.port"),
        ({"server": {"port": "many"}}, "server.port"),
        ({"server": {"prot": 1}}, "server.prot"),
        ({"nonsense": 1}, "nonsense"),
        ({"auth": "perhaps"}, "auth"),
        ({"log_level": "loud"}, "log_level"),
        ({"kernels": {"max_kernels": 0}}, "kernels.max_kernels"),
        ({"kernels": {"default_spec": "r"}}, "kernels"),
        ({"kernels": {"specs": {"python3": {"limits": {"memory": "8g"}}}}}, "kernels.specs.python3"),
        ({"kernels": {"specs": {"python3": {"limits": {"memory": "lots"}}}}}, "kernels.specs.python3.limits"),
        ({"kernels": {"specs": {"python3": {"work_size": "lots"}}}}, "kernels.specs.python3"),
        ({"kernels": {"specs": {"python3": {"limits": {"cpus": 0}}}}}, "kernels.specs.python3.limits.cpus"),
        ({"kernels": {"specs": {"python3": {"limits": {"pids": 5}}}}}, "kernels.specs.python3.limits.pids"),
        ({"kernels": {"specs": {"python3": {"cell_timeout": 1e9}}}}, "kernels.specs.python3"),
        ({"kernels": {"specs": {"python3": {"lifetime": 1e9}}}}, "kernels.specs.python3"),
        ({"link": {"max_parts": 1}}, "link.max_parts"),
        ({"docker": {"link": "pigeon"}}, "docker.link"),
        ({"culling": {"cull_interval": 0}}, "culling.cull_interval"),
    ],
)
def test_a_refusal_names_the_field(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(**overrides)
    assert f"{field}: " in refused.value.detail


def test_a_refusal_names_every_field() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(server={"port": -1}, auth="x", docker={"parallel_calls": 0})
    assert all(f"{field}: " in refused.value.detail for field in ("server.port", "auth", "docker.parallel_calls"))


def test_an_unknown_variable_of_a_known_group_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("CELLGATE_SERVER__PROT", "1")
    with pytest.raises(ConfigurationError, match=r"server\.prot"):
        load()


def frozen_groups(value: Any, path: str = "settings") -> Iterator[tuple[str, Any]]:
    yield path, value
    for name in type(value).model_fields:
        inner = getattr(value, name)
        if hasattr(type(inner), "model_fields"):
            yield from frozen_groups(inner, f"{path}.{name}")


@pytest.mark.parametrize(
    ("path", "group"), list(frozen_groups(Settings())), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_tree_is_frozen(path: str, group: Any) -> None:
    name = next(iter(type(group).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(group, name, getattr(group, name))
