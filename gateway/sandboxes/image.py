"""What the kernel image is made of, and whether an image is made of it.

An image built from older sources starts kernels that speak an older supervisor's language: a fault that shows late and
far from its cause. So the build labels the image with a hash of all that goes into it, and the gateway compares. The
build script loads this file by its path, on machines where nothing is installed yet: standard library only.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# A checkout, or the site-packages that the package is installed in; what the functions below take as `root`.
ROOT = Path(__file__).resolve().parents[2]

IMAGE = "cellgate-kernel:latest"
CONTENT_HASH = "org.cellgate.content-hash"
BASE = "org.cellgate.base"

# Folders and files below the root of a checkout; folders with all that is in them.
SOURCES = (
    "gateway/supervisor",
    "kernel-image/Dockerfile",
    "kernel-image/kernelspec",
    "kernel-image/launcher",
    "kernel-image/requirements.lock",
    "kernel-image/seccomp.json",
    "kernel-image/strip.sh",
)


def source_files(root: Path) -> dict[str, Path]:
    """All files that go into the image, by their name in the build context.

    `root` holds the `gateway` package. An installed wheel carries `kernel-image` inside the package.
    """
    files: dict[str, Path] = {}
    for source in SOURCES:
        path = root / source
        if not path.exists():
            path = root / "gateway" / source
        if not path.exists():
            raise FileNotFoundError(f"{source} is neither in {root} nor in the package below it")
        for file in _files(path):
            files[str(PurePosixPath(source, file.relative_to(path).as_posix()))] = file
    return dict(sorted(files.items()))


def content_hash(root: Path) -> str:
    """The hash that an image built from `root` bears in its label `CONTENT_HASH`: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, path in source_files(root).items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in path.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file
