"""The OpenAPI document is valid, describes every route with its errors, and is true: what it says is what is answered."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from tests.api.routes import APP
from tests.support import Gateway, Kernel

DOCUMENT: dict[str, Any] = APP.openapi()
OPERATIONS = [(path, method, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()]
PROBLEM = "application/problem+json"


def title(operation: tuple[str, str, dict[str, Any]]) -> str:
    return f"{operation[1]} {operation[0]}"


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)


def test_it_is_served_as_it_is(strict: Gateway) -> None:
    assert strict.http.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))


def test_operations_have_names_of_their_own() -> None:
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] and operation["tags"] for _, _, operation in OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=title)
def test_every_operation_tells_its_errors_with_an_example(operation: tuple[str, str, dict[str, Any]]) -> None:
    path, method, described = operation
    errors = {status: answer for status, answer in described["responses"].items() if int(status) >= 400}
    if path != "/healthz":
        assert {"401", "403"} <= set(errors)
    if "{kernel_id}" in path:
        assert "404" in errors
        # What has been recorded of a kernel can be read when it is gone.
        assert ("410" in errors) is not (method == "get" and "/executions" in path)
    if "application/json" in described.get("requestBody", {}).get("content", {}):
        assert {"400", "413", "415", "422"} <= set(errors)
    for status, answer in errors.items():
        assert set(answer["content"]) == {PROBLEM}, status
        examples = answer["content"][PROBLEM]["examples"]
        assert examples
        for code, example in examples.items():
            assert example["value"]["code"] == code
            assert str(example["value"]["status"]) == status
        assert answer["content"][PROBLEM]["schema"] == {"$ref": "#/components/schemas/Problem"}
        assert answer["description"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=title)
def test_every_operation_tells_its_success(operation: tuple[str, str, dict[str, Any]]) -> None:
    successes = {status: answer for status, answer in operation[2]["responses"].items() if int(status) < 300}
    assert list(successes) == (["200", "202"] if operation[0].endswith("/execute") else list(successes)[:1])
    for status, answer in successes.items():
        assert bool(answer.get("content")) == (status != "204")
        assert all(content.get("schema") for content in answer.get("content", {}).values())


@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if "application/json" in o[2].get("requestBody", {}).get("content", {})], ids=title
)
def test_every_json_body_has_an_example(operation: tuple[str, str, dict[str, Any]]) -> None:
    content = operation[2]["requestBody"]["content"]["application/json"]
    schema = json.dumps(content)
    names = [part.split('"')[0] for part in schema.split("#/components/schemas/")[1:]]
    properties = [p for name in names for p in DOCUMENT["components"]["schemas"][name].get("properties", {}).values()]
    assert content.get("examples") or any("examples" in found or "default" in found for found in properties)


def test_nothing_of_the_framework_shows() -> None:
    text = json.dumps(DOCUMENT)
    assert "HTTPValidationError" not in text
    assert "ValidationError" not in DOCUMENT["components"]["schemas"]


def test_the_token_is_asked_for_except_where_it_is_not() -> None:
    assert DOCUMENT["security"] == [{"token": []}]
    assert DOCUMENT["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert [path for path, _, operation in OPERATIONS if operation.get("security") == []] == ["/healthz"]


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def check(value: Any, name: str) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema).validate(value)


def test_answers_are_what_the_document_says(strict: Gateway, kernel: Kernel) -> None:
    check(strict.http.get("/healthz").json(), "Health")
    check(strict.http.get("/v1/kernelspecs").json(), "KernelSpecList")
    check(strict.http.get("/v1/kernels").json(), "KernelList")
    check(kernel.document(), "KernelDocument")
    check(kernel.execute("print(1)\n2"), "ResultDocument")
    check(kernel.execute("1 / 0"), "ResultDocument")
    for event in kernel.events("print(1)\n2"):
        check(event, "EventDocument")
    page = strict.http.get(f"{kernel.path}/executions").json()
    check(page, "SummaryPage")
    for summary in page["executions"]:
        path = f"{kernel.path}/executions/{summary['execution_id']}"
        check(strict.http.get(path).json(), "ResultDocument")
        check(strict.http.get(f"{path}/events").json(), "EventPage")
    check(strict.http.get(f"{kernel.path}/events").json(), "EventPage")
    check(kernel.interrupt(), "Interrupted")
    check(strict.http.put(kernel.file("d/a"), content=b"x").json(), "FileWritten")
    check(strict.http.get(f"{kernel.path}/files").json(), "FileListing")
    check(strict.http.get("/nothing").json(), "Problem")
    assert strict.http.delete(kernel.file("d")).status_code == 204


def test_required_members_are_named_and_no_other_is_sent(kernel: Kernel) -> None:
    result = kernel.execute("1")
    page = kernel.http.get(f"{kernel.path}/executions").json()
    events = kernel.http.get(f"{kernel.path}/executions/{result['execution_id']}/events").json()
    for value, name in (
        (kernel.document(), "KernelDocument"),
        (result, "ResultDocument"),
        (page, "SummaryPage"),
        (page["executions"][0], "SummaryDocument"),
        (events, "EventPage"),
    ):
        assert set(value) == set(DOCUMENT["components"]["schemas"][name]["properties"])


def test_headers_that_a_route_reads_are_told() -> None:
    def headers(path: str, method: str = "get") -> set[str]:
        return {p["name"] for p in DOCUMENT["paths"][path][method].get("parameters", []) if p["in"] == "header"}

    assert headers("/v1/kernels", "post") == {"Idempotency-Key"}
    assert headers("/v1/kernels/{kernel_id}/execute", "post") == {"Idempotency-Key", "Prefer"}
    for path in ("/v1/kernels/{kernel_id}/events", "/v1/kernels/{kernel_id}/executions/{execution_id}/events"):
        assert headers(path) == {"Last-Event-ID"}
