"""The bearer token: where it comes from, who may read it, and what is taken for it."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.auth import TokenCheck, check_bind, credentials, is_loopback, load_token, without_token
from gateway.errors import ConfigurationError
from gateway.settings import load

TOKEN = "correct-horse-battery"


def test_a_configured_token_is_taken_as_it_is(tmp_path: Path) -> None:
    found = load_token(load(state_dir=tmp_path, token=TOKEN))
    assert (found.value, found.created, found.path) == (TOKEN, False, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"  {TOKEN}  "])
def test_space_around_a_configured_token_is_no_part_of_it(tmp_path: Path, token: str) -> None:
    """It comes with ``$(cat file)`` gone wrong, and no client could send it."""
    found = load_token(load(state_dir=tmp_path, token=token))
    assert TokenCheck(found.value)(f"Bearer {TOKEN}")


@pytest.mark.parametrize("token", ["short", "x" * 15, "é" * 20, "x" + " " * 20])
def test_a_configured_token_has_to_be_one(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigurationError, match="at least 16 ASCII characters"):
        load_token(load(state_dir=tmp_path, token=token))


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    settings = load(state_dir=tmp_path / "new" / "state")
    first, second = load_token(settings), load_token(settings)
    assert (first.created, second.created) == (True, False)
    assert first.value == second.value
    assert len(first.value) >= 40
    assert first.path == settings.state_dir / "token"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(settings.state_dir.stat().st_mode) == 0o700


def test_every_new_token_is_another(tmp_path: Path) -> None:
    assert len({load_token(load(state_dir=tmp_path / str(n))).value for n in range(20)}) == 20


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"\xff" * 40, "é".encode() * 20])
def test_a_token_file_that_holds_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigurationError, match="no usable token"):
        load_token(load(state_dir=tmp_path))


@pytest.mark.parametrize("content", ["x" * 16, f"  {TOKEN}\n"])
def test_a_token_file_that_holds_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    assert load_token(load(state_dir=tmp_path)).value == content.strip()


def test_a_state_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for state in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ConfigurationError, match="can't be used"):
            load_token(load(state_dir=state))
    (tmp_path / "state" / "token").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="can't be used"):
        load_token(load(state_dir=tmp_path / "state"))


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_opens(header: str) -> None:
    assert TokenCheck(TOKEN)(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        " ",
        "Bearer",
        "Bearer ",
        TOKEN,
        f" {TOKEN}",
        f"Basic {TOKEN}",
        f"Token {TOKEN}",
        f"Bearer{TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN.upper()}",
        f"Bearer {TOKEN} {TOKEN}",
        f"Bearer {TOKEN}\0",
        "Bearer \ud800",
        "Bearer é",
    ],
)
def test_nothing_else_opens(header: str | None) -> None:
    assert not TokenCheck(TOKEN)(header)


@given(st.text(max_size=60))
def test_no_guess_opens_or_breaks_it(header: str) -> None:
    assert not TokenCheck(TOKEN)(header)
    assert not TokenCheck(TOKEN)(f"Bearer {header}")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)
    check_bind(load(auth="none", server={"host": host}))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "", "127.0.0.1.example.org", "1"]
)
def test_everything_else_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    check_bind(load(auth="token", server={"host": host}))
    with pytest.raises(ConfigurationError, match="loopback addresses alone"):
        check_bind(load(auth="none", server={"host": host}))


def presented(header: str | None, query: bytes, jupyter: bool = True) -> bool:
    return any(TokenCheck(TOKEN)(found) for found in credentials(header, {"query_string": query}, jupyter))


@pytest.mark.parametrize(
    ("header", "query"),
    [
        (f"Bearer {TOKEN}", b""),
        (f"token {TOKEN}", b""),
        (f"Token  {TOKEN}", b""),
        (None, f"token={TOKEN}".encode()),
        ("token x", f"a&token={TOKEN}".encode()),
        ("Basic x", f"token=x&token={TOKEN}".encode()),
    ],
)
def test_what_jupyters_clients_present(header: str | None, query: bytes) -> None:
    assert presented(header, query)
    assert presented(header, query, jupyter=False) is (header == f"Bearer {TOKEN}")


@given(st.text(max_size=40), st.binary(max_size=40))
def test_no_other_request_opens_or_breaks_it(header: str, query: bytes) -> None:
    assert not presented(header, query)
    assert not presented(f"token {header}", b"token=" + query)
    assert TOKEN.encode() not in without_token({"query_string": query + b"&token=" + TOKEN.encode()})["query_string"]


def test_any_page_may_call_only_with_a_token() -> None:
    check_bind(load(server={"allowed_origins": ("*",)}))
    for auth, credentials_too in (("none", False), ("token", True)):
        with pytest.raises(ConfigurationError, match="any web page"):
            check_bind(load(auth=auth, server={"allowed_origins": ("*",), "cors_credentials": credentials_too}))
