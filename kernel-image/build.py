"""Builds `cellgate-kernel:latest`, when the image at hand is not already made of these sources.

Runs before anything is installed: standard library and the `docker` command, so that DOCKER_HOST, contexts and logins
hold. The build context is made here, in memory, of exactly the files that are hashed, plus this machine's CA bundle.
Where the base image cannot be pulled, a base of the same shape is made from Debian's own packages; see `base.py`.
"""

import argparse
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import base

HERE = Path(__file__).resolve().parent
# A checkout, or the site-packages where a wheel has put this folder inside the package.
ROOT = HERE.parent.parent if (HERE.parent / "__init__.py").exists() else HERE.parent

CA_BUNDLES = (
    *(os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(name)),
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
PASSED_ON = (
    *(variant for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY") for variant in (name, name.lower())),
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "PIP_DEFAULT_TIMEOUT",
)
STEP = re.compile(r"^(?:Step \d+/\d+ : |#\d+ \[.*\] )((?:FROM|COPY|RUN) .*)")


def main() -> int:
    """Build if need be; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--base", help=f"base image (default: {base.DEFAULT}, or one made here when it cannot be had)")
    chosen: str | None = parser.parse_args().base
    image = _load_image_module()
    wanted = image.content_hash(ROOT)
    try:
        before = base.inspect(image.IMAGE)
        labels = (before or {}).get("Config", {}).get("Labels") or {}
        if labels.get(image.CONTENT_HASH) == wanted and chosen in (None, labels.get(image.BASE)):
            print(f"{image.IMAGE} is up to date ({wanted}).")
            return 0
        print(f"{image.IMAGE} {'is out of date' if before else 'is not there yet'}: building it.", flush=True)
        using = base.find(chosen)
        labelled = {image.CONTENT_HASH: wanted, image.BASE: using}
        _build(image.IMAGE, using, labelled, _context(image.source_files(ROOT)))
    except base.CannotBuildError as error:
        print(error, file=sys.stderr)
        return 2
    _tidy(image.CONTENT_HASH)
    print(f"{image.IMAGE} is built ({wanted}).")
    return 0


def _load_image_module() -> ModuleType:
    # By its path: importing it as part of the package would need what the package needs.
    spec = importlib.util.spec_from_file_location("image", ROOT / "gateway" / "sandboxes" / "image.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _context(files: dict[str, Path]) -> bytes:
    bundle = next((path for path in map(Path, CA_BUNDLES) if path.is_file()), None)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in {**files, **({"kernel-image/ca-bundle.crt": bundle} if bundle else {})}.items():
            content = path.read_bytes()
            # Names, contents and one mode: neither the times nor the owners of a checkout may spoil the cache.
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _build(tag: str, using: str, labels: dict[str, str], context: bytes) -> None:
    command = ["docker", "build", "--tag", tag, "--file", "kernel-image/Dockerfile"]
    # The machine's own network: its DNS and a proxy on its loopback hold for the build too.
    command += ["--network", "host", "--build-arg", f"BASE={using}"]
    for name, value in labels.items():
        command += ["--label", f"{name}={value}"]
    for name in PASSED_ON:
        # A path of this machine means nothing in the build.
        if os.environ.get(name) and "file:" not in os.environ[name]:
            command += ["--build-arg", name]
    output = []
    with tempfile.TemporaryFile() as archive:
        archive.write(context)
        archive.seek(0)
        process = subprocess.Popen(
            [*command, "-"], stdin=archive, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout
        for line in process.stdout:
            output.append(line)
            if step := STEP.match(line):
                print(f"  {step[1].strip()[:110]}", flush=True)
    if process.wait():
        raise base.CannotBuildError("".join(output[-40:]) + "The build of the kernel image failed; its last lines are above.")


def _tidy(image_label: str) -> None:
    """Remove what earlier builds left behind: 1 GB each."""
    # The classic builder keeps each stage as an image; the newest holds its cache for the next build.
    for label, kept in ((image_label, 0), ("org.cellgate.stage", 1)):
        command = ["docker", "images", "--quiet", "--filter", "dangling=true", "--filter", f"label={label}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        for image in found[kept:]:
            # Fails, rightly, for one that a container still uses.
            subprocess.run(["docker", "image", "rm", image], capture_output=True, check=False)


if __name__ == "__main__":
    raise SystemExit(main())
