"""The variables of Jupyter's gateways: they count, less than our own and more than the file."""

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigurationError
from gateway.settings import JUPYTER_ALIASES, Settings, load


def value_of(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


SAMPLES: dict[str, tuple[str, Any]] = {
    "AUTH_TOKEN": ("a-token-of-some-length", "a-token-of-some-length"),
    "IP": ("0.0.0.0", "0.0.0.0"),
    "PORT": ("9999", 9999),
    "BASE_URL": ("user/x", "/user/x/"),
    "ALLOW_ORIGIN": ("https://a.example, https://b.example", ("https://a.example", "https://b.example")),
    "ALLOW_HEADERS": ("X-One,X-Two", ("X-One", "X-Two")),
    "ALLOW_METHODS": ("GET", ("GET",)),
    "EXPOSE_HEADERS": ("X-Three", ("X-Three",)),
    "ALLOW_CREDENTIALS": ("true", True),
    "MAX_AGE": ("7", 7),
    "MAX_KERNELS": ("3", 3),
    "DEFAULT_KERNEL_NAME": ("python3", "python3"),
    "CULL_IDLE_TIMEOUT": ("60", 60.0),
    "CULL_INTERVAL": ("2", 2.0),
    "CULL_CONNECTED": ("False", False),
    "ENV_WHITELIST": ("A,B", ("A", "B")),
    "CLIENT_ENVS": ("*", ("*",)),
    "KERNEL_LAUNCH_TIMEOUT": ("40", 40.0),
}


def test_every_alias_is_tried() -> None:
    assert set(SAMPLES) == set(JUPYTER_ALIASES)


@pytest.mark.parametrize("prefix", ["KG_", "EG_"])
@pytest.mark.parametrize("alias", SAMPLES)
def test_an_alias_is_the_setting(monkeypatch: pytest.MonkeyPatch, prefix: str, alias: str) -> None:
    text, value = SAMPLES[alias]
    monkeypatch.setenv(f"{prefix}{alias}", text)
    assert value_of(load(), JUPYTER_ALIASES[alias]) == value
    monkeypatch.setenv(f"{prefix}{alias}", "")
    assert value_of(load(), JUPYTER_ALIASES[alias]) == value_of(Settings.model_construct(), JUPYTER_ALIASES[alias])


def test_which_counts_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cellgate.toml"
    file.write_text('[server]\nport = 1\nhost = "::1"\n[kernels]\nmax_kernels = 5')
    assert load(file).server.port == 1
    monkeypatch.setenv("EG_PORT", "2")
    assert load(file).server.port == 2
    monkeypatch.setenv("KG_PORT", "3")
    assert load(file).server.port == 3
    monkeypatch.setenv("CELLGATE_SERVER__PORT", "4")
    settings = load(file)
    assert (settings.server.port, settings.server.host, settings.kernels.max_kernels) == (4, "::1", 5)
    assert load(file, server={"port": 5}).server.port == 5


def test_variables_that_mean_nothing_here_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KG_LIST_KERNELS", "True")
    monkeypatch.setenv("KG_PRESPAWN_COUNT", "3")
    monkeypatch.setenv("EG_PORT_RANGE", "1000..2000")
    assert load().server.port == 8890


def test_a_value_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KG_PORT", "many")
    with pytest.raises(ConfigurationError, match=r"server\.port"):
        load()


@pytest.mark.parametrize(
    ("given", "found"),
    [("", "/"), ("/", "/"), ("a", "/a/"), ("/a/b", "/a/b/"), ("//a//b//", "/a/b/"), ("/~bob/@1-2_3.4/", "/~bob/@1-2_3.4/")],
)
def test_base_urls(given: str, found: str) -> None:
    assert load(server={"base_url": given}).server.base_url == found


@pytest.mark.parametrize("given", ["/a b", "/a?b", "/a#b", "/%61", "/a/../b", "/.", "/é", "http://host/a", "/a\n"])
def test_what_is_no_base_url(given: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        load(server={"base_url": given})
