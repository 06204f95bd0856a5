"""What the image is made of, and the hash that tells whether an image is made of it."""

from pathlib import Path

import pytest

from gateway.sandboxes.image import ROOT, SOURCES, content_hash, source_files


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for source in SOURCES:
        path = tmp_path / source
        if "." in path.name or path.name == "Dockerfile":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        else:
            (path / "deeper").mkdir(parents=True)
            (path / "a.py").write_text("a")
            (path / "deeper" / "b.py").write_text("b")
    return tmp_path


def test_this_checkout_has_all_sources() -> None:
    files = source_files(ROOT)
    assert {name for name in files if name.startswith("gateway/")} == {
        f"gateway/supervisor/{path.name}" for path in (ROOT / "gateway/supervisor").glob("*.py")
    }
    assert "kernel-image/seccomp.json" in files
    assert not any("__pycache__" in name for name in files)
    assert list(files) == sorted(files)


def test_the_supervisor_in_the_image_needs_nothing_that_is_not_there() -> None:
    """Standard library and pyzmq: the image carries no other package of ours."""
    for name, path in source_files(ROOT).items():
        if name.startswith("gateway/supervisor/"):
            imports = [line.split()[1] for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
            assert not [module for module in imports if module.split(".")[0] in ("gateway", "anyio", "structlog", "pydantic")]


def test_the_hash_is_of_names_and_contents(checkout: Path) -> None:
    first = content_hash(checkout)
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert content_hash(checkout) == first
    (checkout / "gateway/supervisor/deeper/b.py").write_text("B")
    second = content_hash(checkout)
    (checkout / "gateway/supervisor/deeper/b.py").rename(checkout / "gateway/supervisor/deeper/c.py")
    third = content_hash(checkout)
    (checkout / "gateway/supervisor/d.py").touch()
    fourth = content_hash(checkout)
    assert len({first, second, third, fourth}) == 4


def test_bytes_that_move_between_files_change_the_hash(checkout: Path) -> None:
    folder = checkout / "gateway/supervisor"
    (folder / "x").write_text("12")
    (folder / "y").write_text("3")
    before = content_hash(checkout)
    (folder / "x").write_text("1")
    (folder / "y").write_text("23")
    assert content_hash(checkout) != before


def test_what_python_leaves_behind_is_no_source(checkout: Path) -> None:
    before = content_hash(checkout)
    cache = checkout / "gateway/supervisor/__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").touch()
    (checkout / "gateway/api").mkdir()
    (checkout / "gateway/api/new.py").touch()
    assert content_hash(checkout) == before


def test_an_installed_package_has_the_same_hash(checkout: Path) -> None:
    """A wheel carries `kernel-image` inside the package."""
    before = content_hash(checkout)
    (checkout / "kernel-image").rename(checkout / "gateway" / "kernel-image")
    assert content_hash(checkout) == before


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_source_is_named(checkout: Path, source: str) -> None:
    (checkout / source).rename(checkout / "elsewhere")
    with pytest.raises(FileNotFoundError, match=source):
        source_files(checkout)
