"""What is wrong with a request is said in a problem document with a stable code; and a wrong request changes nothing."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus

from gateway.errors import all_errors
from tests.api.conftest import MAX_BODY, MAX_CODE, MAX_UPLOAD
from tests.api.jupyter import refused
from tests.api.routes import HTTP_ROUTES, NOBODY
from tests.support import Gateway, Kernel, problem, running

JSON = {"Content-Type": "application/json"}


# things that are not there


def test_what_is_not_there_is_told_by_its_kind(strict: Gateway, kernel: Kernel) -> None:
    http = strict.http
    problem(http.get("/v1/nothing"), 404, "not_found")
    answer = problem(http.post("/v1/kernels", json={"spec": "cobol"}), 404, "spec_not_found")
    assert answer["specs"] == ["python3"]
    for path in (
        f"/v1/kernels/{NOBODY}",
        "/v1/kernels/x",
        f"/v1/kernels/{kernel.id.upper()}",
        "/v1/kernels/%00",
        "/v1/kernels/" + "x" * 3000,
    ):
        problem(http.get(path), 404, "kernel_not_found")
        problem(http.delete(path), 404, "kernel_not_found")
        problem(http.post(f"{path}/execute", json={"code": "1"}), 404, "kernel_not_found")
        problem(http.post(f"{path}/restart"), 404, "kernel_not_found")
        problem(http.get(f"{path}/files"), 404, "kernel_not_found")
        problem(http.put(f"{path}/files/x", content=b""), 404, "kernel_not_found")
        problem(http.get(f"{path}/events"), 404, "kernel_not_found")
    for path in (f"{kernel.path}/executions/{NOBODY}", f"{kernel.path}/executions/x"):
        problem(http.get(path), 404, "execution_not_found")
        problem(http.delete(path), 404, "execution_not_found")
        problem(http.post(f"{path}/input", json={"value": ""}), 404, "execution_not_found")
    problem(http.get(kernel.file("missing")), 404, "file_not_found")


def test_an_execution_of_one_kernel_is_none_of_another(strict: Gateway, kernel: Kernel) -> None:
    execution = kernel.execute("1")["execution_id"]
    with strict.kernel() as other:
        problem(strict.http.get(f"{other.path}/executions/{execution}"), 404, "execution_not_found")


def test_the_socket_of_no_kernel_is_refused_with_the_reason(strict: Gateway) -> None:
    with pytest.raises(InvalidStatus) as error, strict.connect(f"/v1/kernels/{NOBODY}/ws"):
        pass
    assert error.value.response.status_code == 404
    assert json.loads(error.value.response.body)["code"] == "kernel_not_found"


# bodies


POSTS = ["/v1/kernels", "{kernel}/execute"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nonsense",
        b'{"code": "1"',
        b"{'code': 1}",
        b"\xff\xfe\x00",
        b'"\\ud800',
        b"[" * 100_000,
        b'{"code": "\x00"}',
        b"NaN\x00",
        b'{"a":' * 20_000,
    ],
)
def test_a_body_that_is_no_json_is_malformed(strict: Gateway, kernel: Kernel, path: str, body: bytes) -> None:
    answer = strict.http.post(path.format(kernel=kernel.path), content=body, headers=JSON)
    problem(answer, 400, "malformed_body")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [b"[]", b"1", b'"code"', b"true", b"[1, 2]", b'{"code": "1"}{"code": "2"}'])
def test_a_body_that_is_no_object_is_refused(strict: Gateway, kernel: Kernel, path: str, body: bytes) -> None:
    answer = strict.http.post(path.format(kernel=kernel.path), content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) in ((422, "invalid_request"), (400, "malformed_body"))


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "media",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/json-patch+json",
        "application/jsonx",
        "x",
    ],
)
def test_a_body_of_another_type_is_refused(strict: Gateway, kernel: Kernel, path: str, media: str) -> None:
    # A web page can send the first three to anybody without asking first.
    before = kernel.execute("1")["execution_count"]
    url = path.format(kernel=kernel.path)
    problem(strict.http.post(url, content=b'{"code": "1"}', headers={"Content-Type": media}), 415, "unsupported_media_type")
    problem(
        strict.http.post(url, content=iter([b'{"code": "1"}']), headers={"Content-Type": media}), 415, "unsupported_media_type"
    )
    assert kernel.execute("1")["execution_count"] == before + 1


def test_json_may_say_its_charset(strict: Gateway, kernel: Kernel) -> None:
    answer = strict.http.post(
        f"{kernel.path}/execute", content=b'{"code": "1"}', headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert answer.status_code == 200


def raw(gateway: Gateway, head: str, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the answer to a request that no client library would send."""
    host = urlsplit(gateway.url)
    with socket.create_connection((host.hostname, host.port), timeout=60) as connection:
        text = f"{head}\r\nHost: {host.netloc}\r\nAuthorization: Bearer {gateway.token}\r\nConnection: close\r\n\r\n"
        connection.sendall(text.encode())
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
    status, _, body = answer.partition(b"\r\n\r\n")
    return int(status.split(b" ", 2)[1]), json.loads(body or b"{}")


def test_a_body_that_declares_too_much_is_refused_before_it_is_read(strict: Gateway, kernel: Kernel) -> None:
    for path, limit in (("/v1/kernels", MAX_BODY), (f"{kernel.path}/execute", MAX_BODY)):
        status, document = raw(strict, f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {limit + 1}")
        assert (status, document["code"], document["limit"]) == (413, "body_too_large", limit)
    status, document = raw(strict, f"PUT {kernel.file('big')} HTTP/1.1\r\nContent-Length: {MAX_UPLOAD + 1}")
    assert (status, document["code"], document["limit"]) == (413, "body_too_large", MAX_UPLOAD)


def test_a_chunked_body_is_counted_as_it_comes(strict: Gateway, kernel: Kernel) -> None:
    pieces = (b" " * 10_000 for _ in range(100))
    problem(strict.http.post(f"{kernel.path}/execute", content=pieces, headers=JSON), 413, "body_too_large")
    pieces = (b"x" * 100_000 for _ in range(20))
    problem(strict.http.put(kernel.file("big"), content=pieces), 413, "body_too_large")
    problem(strict.http.get(kernel.file("big")), 404, "file_not_found")
    assert kernel.http.get(f"{kernel.path}/files").json()["entries"] == []


def test_an_upload_up_to_its_limit_is_taken(strict: Gateway, kernel: Kernel) -> None:
    assert strict.http.put(kernel.file("fits"), content=b"x" * MAX_UPLOAD).status_code == 201
    assert strict.http.delete(kernel.file("fits")).status_code == 204


def test_a_body_that_stops_coming_is_given_up() -> None:
    with running(server={"body_timeout": 0.3}) as gateway, gateway.kernel() as kernel:
        for head, piece in (
            (f"POST {kernel.path}/execute HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100", b'{"code'),
            (f"POST {kernel.path}/execute HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100", b""),
            (
                f"POST {kernel.path}/execute HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked",
                b'6\r\n{"code\r\n',
            ),
            (f"PUT {kernel.file('slow')} HTTP/1.1\r\nContent-Length: 100", b"x"),
        ):
            status, document = raw(gateway, head, piece)
            assert (status, document["code"]) == (400, "malformed_body")
        assert kernel.http.get(f"{kernel.path}/files").json()["entries"] == []
        # Each piece has that time, not the whole.
        assert kernel.value("1") == "1"


@pytest.mark.parametrize("piece", [b"x" * 100_000, b"\r\nX-Another: header" * 5_000], ids=["one header", "many headers"])
def test_a_head_without_an_end_is_cut_off(strict: Gateway, piece: bytes) -> None:
    # Anybody may send it: the token comes later.
    host = urlsplit(strict.url)
    with socket.create_connection((host.hostname, host.port), timeout=60) as connection:
        connection.sendall(f"GET /v1/kernels HTTP/1.1\r\nHost: {host.netloc}\r\nX-Long: ".encode())
        try:
            for _ in range(50):
                connection.sendall(piece)
            connection.sendall(b"\r\n\r\n")
            answer = connection.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    assert answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"431")
    assert strict.http.get("/healthz").status_code == 200


# values


BAD_EXECUTES: list[dict[str, Any]] = [
    {},
    {"code": None},
    {"code": 1},
    {"code": ["1"]},
    {"code": "1", "unknown": 1},
    {"code": "1", "Code": "1"},
    {"code": "1", "timeout": 0},
    {"code": "1", "timeout": -1},
    {"code": "1", "timeout": "soon"},
    {"code": "1", "timeout": []},
    {"code": "1", "silent": "perhaps"},
    {"code": "1", "store_history": 7},
    {"code": "1", "stop_on_error": None},
    {"code": "1", "allow_stdin": "x"},
]


@pytest.mark.parametrize("body", BAD_EXECUTES, ids=str)
def test_a_wrong_execute_is_refused(kernel: Kernel, body: dict[str, Any]) -> None:
    answer = problem(kernel.http.post(f"{kernel.path}/execute", json=body), 422, "invalid_request")
    assert answer["errors"]
    assert all(set(error) == {"where", "what"} for error in answer["errors"])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "-1e400"])
def test_a_timeout_that_is_no_number_is_refused(kernel: Kernel, number: str) -> None:
    answer = kernel.http.post(f"{kernel.path}/execute", content=f'{{"code": "1", "timeout": {number}}}'.encode(), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) in ((422, "invalid_request"), (400, "malformed_body"))


@pytest.mark.parametrize("number", ["86401", "1e9", "1e308", "1e400", "Infinity"])
def test_a_timeout_above_the_maximum_is_refused(kernel: Kernel, number: str) -> None:
    answer = kernel.http.post(f"{kernel.path}/execute", content=f'{{"code": "1", "timeout": {number}}}'.encode(), headers=JSON)
    document = problem(answer, 422, answer.json()["code"])
    assert document["code"] in ("limit_exceeded", "invalid_request")
    if document["code"] == "limit_exceeded":
        assert (document["limit"], document["maximum"]) == ("timeout", 86_400.0)


def test_code_has_a_longest_length_in_bytes(kernel: Kernel) -> None:
    assert kernel.execute("#" + "x" * (MAX_CODE - 1))["status"] == "ok"
    problem(kernel.post("#" + "x" * MAX_CODE), 413, "body_too_large")
    problem(kernel.post("#" + "ä" * (MAX_CODE // 2)), 413, "body_too_large")


@pytest.mark.parametrize("code", [r"'\ud800'", r"\udfff", r"print('\ud83d')"])
def test_a_lone_surrogate_is_no_text(kernel: Kernel, code: str) -> None:
    body = f'{{"code": "{code}"}}'.encode()
    answer = kernel.http.post(f"{kernel.path}/execute", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) in ((422, "invalid_request"), (400, "malformed_body"))
    assert kernel.value("1") == "1"


@pytest.mark.parametrize("code", ["", " ", "\n", "\0", "# ä ✓ 🎉", "'\u2028'", "x = '\\ud800'", "pass\r\npass"])
def test_code_of_every_kind_ends(kernel: Kernel, code: str) -> None:
    assert kernel.execute(code)["status"] in ("ok", "error")
    assert kernel.value("1") == "1"


BAD_CREATES: dict[str, list[dict[str, Any]]] = {
    "invalid_request": [
        {"unknown": 1},
        {"spec": 1},
        {"spec": "x" * 129},
        {"label": "x" * 201},
        {"label": 1},
        {"limits": []},
        {"limits": {"memory": "much"}},
        {"limits": {"memory": []}},
        {"limits": {"memory": "nan"}},
        {"limits": {"memory": "1e400g"}},
        {"limits": {"cpus": 0}},
        {"limits": {"cpus": -1}},
        {"limits": {"cpus": "all"}},
        {"limits": {"pids": 0}},
        {"limits": {"pids": 1.5}},
        {"limits": {"disk": "1g"}},
        {"env": []},
        {"env": {"A": 1}},
        {"env": {"A": None}},
        {"env": {"A": "x" * 8193}},
        {"env": {f"A{n}": "" for n in range(65)}},
    ],
    "limit_exceeded": [
        {"limits": {"memory": "5g"}},
        {"limits": {"memory": 2**62}},
        {"limits": {"memory": "1m"}},
        {"limits": {"memory": 0}},
        {"limits": {"memory": -1}},
        {"limits": {"memory": "-1g"}},
        {"limits": {"cpus": 4.01}},
        {"limits": {"cpus": 0.001}},
        {"limits": {"cpus": 1e300}},
        {"limits": {"pids": 513}},
        {"limits": {"pids": 1}},
    ],
}


@pytest.mark.parametrize(
    ("code", "body"), [(code, body) for code, bodies in BAD_CREATES.items() for body in bodies], ids=lambda v: str(v)[:60]
)
def test_a_wrong_create_is_refused_and_starts_nothing(strict: Gateway, kernel: Kernel, code: str, body: dict[str, Any]) -> None:
    document = problem(strict.http.post("/v1/kernels", json=body), 422, code)
    if code == "limit_exceeded":
        assert document["limit"] in body["limits"]
        assert document["minimum"] < document["maximum"]
    assert [entry["id"] for entry in strict.http.get("/v1/kernels").json()["kernels"]] == [kernel.id]


NAMES = [
    *(
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "ld_preload",
        "PYTHONSTARTUP",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PATH",
        "Path",
    ),
    *("HOME", "BASH_ENV", "ENV", "IFS", "IPYTHONDIR", "JPY_PARENT_PID", "CELLGATE_CPUS", "GLIBC_TUNABLES", "MALLOC_PERTURB_"),
    *("a=b", "", " ", "A B", "1A", "A-B", "Ä", "A\0", "A\n", "=", "A" * 129),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_could_change_what_runs_is_refused(strict: Gateway, name: str) -> None:
    problem(strict.http.post("/v1/kernels", json={"env": {name: "x"}}), 422, "invalid_request")


def test_a_value_with_nul_is_refused(strict: Gateway) -> None:
    problem(strict.http.post("/v1/kernels", json={"env": {"A": "a\0b"}}), 422, "invalid_request")


def test_variables_of_every_other_kind_arrive(strict: Gateway) -> None:
    env = {"STAGE": "demo", "lower": "1", "_X9": "", "LINES": "a\nb=c", "TEXT": "ä ✓ 🎉", "A" * 128: "long"}
    with strict.kernel(env=env, label="x" * 200) as kernel:
        assert kernel.call(of_environment, list(env)) == list(env.values())


def of_environment(names: list[str]) -> Any:
    import os

    return [os.environ[name] for name in names]


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 30, "NaN"])
def test_a_wrong_place_in_the_events_is_refused(kernel: Kernel, after: str) -> None:
    # An answer that were no refusal would be a stream without an end: only its head is read.
    with kernel.http.stream("GET", f"{kernel.path}/events", params={"after": after}) as answer:
        assert answer.status_code == 422
        answer.read()
        problem(answer, 422, "invalid_request")


# methods


def test_a_wrong_method_is_told_with_those_that_there_are(strict: Gateway, kernel: Kernel) -> None:
    methods: dict[str, set[str]] = {}
    for route in HTTP_ROUTES:
        assert route.method
        methods.setdefault(route.url, set()).add(route.method)
    for url, known in methods.items():
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH"} - known:
            answer = strict.http.request(method, url)
            if url.startswith(("/api", "/kernelspecs")):
                refused(answer, 405)
            else:
                problem(answer, 405, "method_not_allowed")
            assert answer.headers["allow"]


# the words


def test_codes_are_stable_and_belong_to_one_status() -> None:
    codes = {error.code: error.status for error in all_errors()}
    assert len(codes) == len(all_errors())
    expected = {
        "unauthorized": 401,
        "forbidden_origin": 403,
        "invalid_request": 422,
        "malformed_body": 400,
        "unsupported_media_type": 415,
        "body_too_large": 413,
        "limit_exceeded": 422,
        "not_found": 404,
        "method_not_allowed": 405,
        "spec_not_found": 404,
        "kernel_not_found": 404,
        "execution_not_found": 404,
        "data_not_found": 404,
        "file_not_found": 404,
        "invalid_path": 422,
        "not_a_file": 409,
        "sandbox_disk_full": 507,
        "kernel_dead": 409,
        "kernel_gone": 410,
        "kernel_unavailable": 409,
        "not_waiting_for_input": 409,
        "queue_full": 429,
        "too_many_kernels": 429,
        "start_failed": 502,
        "start_timeout": 504,
        "sandbox_timeout": 504,
        "engine_unavailable": 503,
        "image_missing": 503,
        "shutting_down": 503,
        "store_unavailable": 503,
        "idempotency_conflict": 409,
    }
    assert {code: codes.get(code) for code in expected} == expected
