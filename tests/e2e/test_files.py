"""Files in and out of a kernel's work directory: whole, exact, and nowhere else; whatever the cell in it is doing.

What the cell may have laid there (links, sockets, a full disk) is part of the test: the routes have to refuse it or live with it.
"""

import hashlib
import io
import os
import socket
import tarfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.support import Gateway, Kernel, eventually, problem, running

HUNDRED_MB = 100_000_000


def put(kernel: Kernel, path: str, content: bytes | Iterator[bytes], **headers: str) -> Any:
    return kernel.http.put(kernel.file(quote(path)), content=content, headers=headers, timeout=120)


def get(kernel: Kernel, path: str, **headers: str) -> Any:
    return kernel.http.get(kernel.file(quote(path)), headers=headers, timeout=120)


def names(kernel: Kernel, path: str = "") -> list[str]:
    answer = get(kernel, path)
    assert answer.status_code == 200, answer.text
    return [entry["name"] for entry in answer.json()["entries"]]


def tar_of(files: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for entry in special:
            archive.addfile(entry)
    return buffer.getvalue()


def test_a_file_goes_in_and_out_unchanged(kernel: Kernel) -> None:
    content = bytes(range(256)) * 1000
    answer = put(kernel, "data.bin", content)
    assert (answer.status_code, answer.json()) == (201, {"path": "data.bin", "size": len(content)})
    assert kernel.value("open('data.bin', 'rb').read() == bytes(range(256)) * 1000") == "True"
    back = get(kernel, "data.bin")
    assert (back.status_code, back.content) == (200, content)
    assert back.headers["content-type"] == "application/octet-stream"
    assert back.headers["content-disposition"] == "attachment; filename*=UTF-8''data.bin"


@pytest.mark.parametrize(
    "path", ["empty", "deep/er/and/deeper/file.txt", "süd/✓ and spaces.csv", "a%2Fb", "quote'\"&=?#", "-rf", "~", "x" * 255]
)
def test_names_of_every_kind(shared: Kernel, path: str) -> None:
    content = b"" if path == "empty" else path.encode()
    assert put(shared, path, content).status_code == 201
    assert get(shared, path).content == content
    assert shared.value(f"open({path!r}, 'rb').read() == {content!r}") == "True"
    directory, _, name = path.rpartition("/")
    assert name in names(shared, directory)
    assert shared.http.delete(shared.file(quote(path))).status_code == 204
    problem(get(shared, path), 404, "file_not_found")


def test_a_listing_tells_what_is_there(kernel: Kernel) -> None:
    kernel.run(
        "import os\nos.makedirs('d/inner')\nopen('b', 'w').write('12345')\nos.symlink('/etc/passwd', 'a')\nos.utime('b', (1, 1_000_000_000))"
    )
    listing = kernel.http.get(f"{kernel.path}/files").json()
    assert (listing["path"], listing["complete"]) == ("", True)
    found = {entry["name"]: (entry["path"], entry["type"]) for entry in listing["entries"]}
    assert found == {"a": ("a", "symlink"), "b": ("b", "file"), "d": ("d", "directory")}
    entry = next(entry for entry in listing["entries"] if entry["name"] == "b")
    assert (entry["size"], entry["modified"]) == (5, 1_000_000_000)
    assert get(kernel, "d").json()["entries"][0]["path"] == "d/inner"
    assert get(kernel, "d/").json() == get(kernel, "d").json()
    assert names(kernel, "d/inner") == []
    problem(get(kernel, "b/"), 409, "not_a_file")
    problem(get(kernel, "missing/"), 404, "file_not_found")
    problem(get(kernel, "b/inside"), 404, "file_not_found")


def test_a_hundred_megabytes_go_in_and_out(kernel: Kernel) -> None:
    block = os.urandom(1_000_000)
    content = block * (HUNDRED_MB // len(block))
    assert put(kernel, "big", content).json()["size"] == HUNDRED_MB
    digest = hashlib.sha256(content).hexdigest()
    assert kernel.value("import hashlib\nhashlib.sha256(open('big', 'rb').read()).hexdigest()") == repr(digest)
    assert hashlib.sha256(get(kernel, "big").content).hexdigest() == digest


def test_files_move_while_a_cell_runs(kernel: Kernel) -> None:
    code = """
import os, time
open('from-cell', 'w').write('ready')
while not os.path.exists('from-client'): time.sleep(0.01)
print(open('from-client').read())
"""
    with kernel.submitted(code) as cell:
        eventually(lambda: get(kernel, "from-cell").content == b"ready", "the cell has written its file")
        put(kernel, "from-client", b"the word")
        assert cell.end()["status"] == "ok"
        assert [event["text"] for event in cell.events if event["type"] == "stream"] == ["the word\n"]


def test_files_move_while_the_interpreter_is_stuck(kernel: Kernel) -> None:
    # Not a line of Python runs in the kernel meanwhile: the transfers are the supervisor's.
    with kernel.submitted("import re\nprint('in', flush=True)\nre.match(r'(a+)+$', 'a' * 60 + 'b')") as cell:
        cell.wait_for("stream")
        assert put(kernel, "file", b"x" * 3_000_000).status_code == 201
        assert len(get(kernel, "file").content) == 3_000_000
        assert kernel.document()["state"] == "busy"


def test_files_outlive_a_crash_of_the_kernel(kernel: Kernel) -> None:
    put(kernel, "file", b"kept")
    kernel.execute("import os\nos._exit(1)")
    assert get(kernel, "file").content == b"kept"
    assert put(kernel, "late", b"late").status_code == 201
    kernel.restart()
    assert kernel.value("open('file').read() + open('late').read()") == "'keptlate'"


def test_a_directory_goes_in_and_out_as_tar(kernel: Kernel) -> None:
    files = {"a.txt": b"a", "inner/b.bin": bytes(100_000), "inner/süd.txt": b"c"}
    answer = put(kernel, "up/load/", tar_of(files), **{"Content-Type": "application/x-tar"})
    assert (answer.status_code, answer.json()) == (201, {"path": "up/load/", "size": None})
    assert kernel.value("open('up/load/inner/süd.txt').read()") == "'c'"
    back = get(kernel, "up", Accept="application/x-tar")
    assert (back.status_code, back.headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(back.content)) as archive:
        found = {member.name.removeprefix("./"): member for member in archive.getmembers() if member.isfile()}
        assert {name: archive.extractfile(member).read() for name, member in found.items()} == {  # type: ignore[union-attr]
            f"load/{name}": content for name, content in files.items()
        }
    whole = get(kernel, "", Accept="application/x-tar")
    assert b"up/load/a.txt" in whole.content


def test_a_broken_archive_is_refused_and_the_kernel_goes_on(shared: Kernel) -> None:
    tar = {"Content-Type": "application/x-tar"}
    problem(put(shared, "broken/", b"this is no tar" * 1000, **tar), 400, "malformed_body")
    problem(put(shared, "broken/", tar_of({"a": bytes(50_000)})[:20_000], **tar), 400, "malformed_body")
    problem(put(shared, "broken/", b"x"), 422, "invalid_path")
    assert shared.value("1") == "1"


def test_an_archive_cannot_reach_out_of_its_directory(kernel: Kernel) -> None:
    link, absolute, pipe, device = (tarfile.TarInfo(name) for name in ("link", "absolute", "pipe", "device"))
    link.type, link.linkname = tarfile.SYMTYPE, "../.."
    absolute.type, absolute.linkname = tarfile.SYMTYPE, "/tmp"
    pipe.type = tarfile.FIFOTYPE
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 5
    archives = [
        tar_of({"../escaped": b"x"}),
        tar_of({"/work/escaped": b"x"}),
        tar_of({"/tmp/escaped": b"x"}),
        tar_of({}, link) + tar_of({"link/escaped": b"x"}),
        tar_of({}, absolute),
        tar_of({}, pipe),
        tar_of({}, device),
    ]
    for archive in archives:
        put(kernel, "inner/unpacked/", archive, **{"Content-Type": "application/x-tar"})
    found = kernel.run(
        "import os\nfor d in ('/', '/tmp', '/work', '/work/inner'): print([n for n in os.listdir(d) if 'escaped' in n])"
    )
    assert found == "[]\n" * 4
    kinds = {entry["name"]: entry["type"] for entry in get(kernel, "inner/unpacked").json()["entries"]}
    assert not {"pipe", "device"} & set(kinds)
    # A link that a tar has brought is as dead an end as any other.
    if "absolute" in kinds:
        problem(get(kernel, "inner/unpacked/absolute/x"), 404, "file_not_found")
        problem(put(kernel, "inner/unpacked/absolute/x", b""), 404, "file_not_found")


TRAVERSALS = ["..", "../etc/passwd", "a/../../etc/passwd", "/etc/passwd", "//etc/passwd", "a/./b", ".", "./a", "a\0b", "\0"]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_a_path_that_is_none_is_refused(shared: Kernel, path: str) -> None:
    url = shared.file(quote(path, safe="").replace(".", "%2E"))
    for answer in (shared.http.get(url), shared.http.put(url, content=b"x"), shared.http.delete(url)):
        problem(answer, 422, "invalid_path")
    assert shared.value("__import__('os').path.exists('/etc/passwd')") == "True"


def open_request(gateway: Gateway, line: str, *headers: str) -> socket.socket:
    """A connection on which the head of a request has been sent, as no client library would send it."""
    host = urlsplit(gateway.url)
    connection = socket.create_connection((host.hostname, host.port), timeout=60)
    lines = [f"{line} HTTP/1.1", f"Host: {host.netloc}", f"Authorization: Bearer {gateway.token}", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def test_raw_dots_in_the_url_lead_nowhere(gateway: Gateway, shared: Kernel) -> None:
    # As a client without any normalisation of its own sends them.
    for path in (
        "../../../etc/passwd",
        "..%2f..%2fetc/passwd",
        "....//....//etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "..;/etc/passwd",
    ):
        with open_request(gateway, f"GET {shared.file(path)}", "Connection: close") as connection:
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.split(b" ", 2)[1] in (b"404", b"422"), answer
        assert b"root:" not in answer


def test_links_and_other_kinds_are_refused(kernel: Kernel) -> None:
    kernel.run("""
import os, socket
os.mkdir('d')
open('d/file', 'w').write('inside')
os.symlink('/etc/passwd', 'out')
os.symlink('d/file', 'in')
os.symlink('/dev/zero', 'endless')
try: os.mkfifo('pipe')
except PermissionError: pass  # the sandbox refuses it in the first place
os.symlink('/', 'root')
os.symlink('d', 'dir')
socket.socket(socket.AF_UNIX).bind('socket')
""")
    for name in ("out", "in", "endless", "root", "dir", "socket"):
        problem(get(kernel, name), 409, "not_a_file")
        problem(put(kernel, name, b"x"), 409, "not_a_file")
    for name in ("root/etc/passwd", "dir/file"):
        problem(get(kernel, name), 404, "file_not_found")
        problem(put(kernel, name, b"x"), 404, "file_not_found")
        problem(kernel.http.delete(kernel.file(name)), 404, "file_not_found")
    problem(put(kernel, "d", b"x"), 409, "not_a_file")
    assert kernel.value("os.listdir('d'), open('/etc/passwd').read(5)") == "(['file'], 'root:')"
    # What is deleted is the link, never what it points to.
    for name in ("out", "in", "dir", "socket"):
        assert kernel.http.delete(kernel.file(name)).status_code == 204
    assert kernel.value("sorted(os.listdir()), os.listdir('d')") == "(['d', 'endless', 'root'], ['file'])"


def test_deleting_a_directory_takes_all_that_is_in_it(kernel: Kernel) -> None:
    kernel.run("""
import os
os.makedirs('d/e/f')
os.mkdir('kept')
for path in ('d/e/f/g', 'kept/file'): open(path, 'w').close()
os.symlink('/work/kept', 'd/link')
""")
    assert kernel.http.delete(kernel.file("d")).status_code == 204
    assert kernel.value("os.listdir(), os.listdir('kept')") == "(['kept'], ['file'])"
    problem(kernel.http.delete(kernel.file("d")), 404, "file_not_found")
    problem(kernel.http.delete(kernel.file("")), 422, "invalid_path")


def test_a_directory_that_cannot_be_deleted_is_told(kernel: Kernel) -> None:
    kernel.run("import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0o500)")
    answer = kernel.http.delete(kernel.file("d"))
    assert answer.status_code in (204, 409)
    assert ("d" in names(kernel)) == (answer.status_code == 409)
    assert kernel.value("1") == "1"


def test_a_file_that_is_written_over_is_never_half_there(kernel: Kernel) -> None:
    size = 2_000_000
    put(kernel, "file", b"0" * size)
    code = f"""
import os
seen = set()
while not os.path.exists('stop'):
    with open('file') as file:
        text = file.read()
    assert len(text) == {size} and len(set(text)) == 1, (len(text), set(text))
    seen.add(text[0])
print(len(seen) > 1)
"""
    with kernel.submitted(code) as cell:
        for number in range(30):
            assert put(kernel, "file", str(number % 10).encode() * size).status_code == 201
        put(kernel, "stop", b"")
        cell.end()
        assert [event.get("text") for event in cell.events if event["type"] in ("stream", "error")] == ["True\n"]


def test_an_upload_that_breaks_off_leaves_the_old_file(gateway: Gateway, kernel: Kernel) -> None:
    put(kernel, "file", b"old")
    with open_request(gateway, f"PUT {kernel.file('file')}", "Content-Length: 5000000") as connection:
        connection.sendall(b"n" * 1_000_000)
        eventually(lambda: len(names(kernel)) == 2, "the new file is on its way, under a name of its own")
    eventually(lambda: names(kernel) == ["file"], "its remains are cleared away")
    assert get(kernel, "file").content == b"old"


def test_a_download_that_breaks_off_hurts_nobody(kernel: Kernel) -> None:
    put(kernel, "big", b"x" * 50_000_000)
    for _ in range(3):
        with kernel.http.stream("GET", kernel.file("big")) as answer:
            assert next(answer.iter_bytes())
    assert len(get(kernel, "big").content) == 50_000_000
    assert kernel.value("1") == "1"


@pytest.fixture(scope="module")
def small() -> Iterator[Kernel]:
    """A kernel with a disk of 16 MiB."""
    with (
        running(kernels={"specs": {"python3": {"work_size": "16m", "tmp_size": "16m"}}}) as gateway,
        gateway.kernel() as kernel,
    ):
        yield kernel


def test_a_full_disk_is_told_and_everything_goes_on(small: Kernel) -> None:
    put(small, "kept", b"kept")
    refused = problem(put(small, "big", b"x" * 20_000_000), 507, "sandbox_disk_full")
    assert refused["retryable"] is False
    assert names(small) == ["kept"]
    # Also without a declared length, and from a client that never stops sending.
    problem(put(small, "big", (b"x" * 100_000 for _ in range(300))), 507, "sandbox_disk_full")
    problem(
        put(small, "d/", tar_of({"big": bytes(20_000_000)}), **{"Content-Type": "application/x-tar"}), 507, "sandbox_disk_full"
    )
    small.http.delete(small.file("d"))
    assert names(small) == ["kept"]
    assert put(small, "fits", b"x" * 1_000_000).status_code == 201
    assert small.value("open('kept').read()") == "'kept'"


def test_a_disk_filled_by_a_cell_is_an_error_of_the_cell(small: Kernel) -> None:
    result = small.execute("with open('hog', 'wb', buffering=0) as file:\n    while True: file.write(bytes(100_000))")
    assert (result["status"], result["outputs"][-1]["ename"]) == ("error", "OSError")
    assert "No space left on device" in result["outputs"][-1]["evalue"]
    problem(put(small, "another", b"x" * 200_000), 507, "sandbox_disk_full")
    assert small.http.delete(small.file("hog")).status_code == 204
    assert put(small, "another", b"x" * 200_000).status_code == 201
    assert small.value("1") == "1"


def test_a_kernel_whose_disks_are_full_can_be_restarted(small: Kernel) -> None:
    small.run("""
for directory in ('/work', '/tmp'):
    try:
        with open(directory + '/hog', 'wb', buffering=0) as file:
            while True: file.write(bytes(4096))
    except OSError: pass
""")
    assert small.restart()["state"] == "idle"
    assert small.value("import os\nos.path.getsize('/work/hog') > 10_000_000") == "True"
    for directory in ("/work", "/tmp"):
        small.run(f"os.path.exists('{directory}/hog') and os.unlink('{directory}/hog')")


def test_a_growing_file_ends_somewhere(kernel: Kernel) -> None:
    code = """
import time
print('in', flush=True)
with open('grows', 'wb', buffering=0) as file:
    while True:
        file.write(bytes(1000))
        time.sleep(0.001)
"""
    with kernel.submitted(code) as cell:
        cell.wait_for("stream")
        eventually(lambda: "grows" in names(kernel), "the file is there")
        assert set(get(kernel, "grows").content) <= {0}
        kernel.interrupt()
        cell.end()


def test_a_directory_with_many_entries_says_that_its_listing_is_cut(kernel: Kernel) -> None:
    kernel.run("for n in range(10_001): open(f'{n:05}', 'w').close()")
    listing = kernel.http.get(f"{kernel.path}/files").json()
    assert (len(listing["entries"]), listing["complete"]) == (10_000, False)
