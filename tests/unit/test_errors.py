"""The one tree of errors: every class is told apart by its code and carries what each face needs to report it."""

import importlib
import pkgutil

import pytest

import gateway
from gateway.api import problems
from gateway.errors import ConfigurationError, GatewayError, all_errors


def everything_imported() -> list[type[GatewayError]]:
    """All classes, those of other modules among them."""
    for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
        if "__main__" not in module.name and not module.name.startswith("gateway.notebook.html"):
            importlib.import_module(module.name)
    return all_errors()


ERRORS = everything_imported()


def test_every_code_is_there_once() -> None:
    codes = [error.code for error in ERRORS]
    assert sorted(codes) == sorted(set(codes))
    assert all(code == code.lower() and code.replace("_", "").isalpha() for code in codes)
    assert ERRORS[0] is GatewayError
    assert len(ERRORS) > 25


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_a_class_says_what_each_face_needs(error: type[GatewayError]) -> None:
    assert error.__doc__ is not None
    title = error("detail").title
    assert title == error.__doc__.strip().splitlines()[0]
    assert not title.endswith(".")
    assert "code" in vars(error)
    assert 400 <= error.status <= 599
    assert error.ws_close in (1001, 1009, 1011, 1012) or error.ws_close == 4000 + error.status or 4400 <= error.ws_close < 4600
    assert isinstance(error.retryable, bool)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_a_problem_document(error: type[GatewayError]) -> None:
    document = problems.document(error("what happened", kernel_id="k", limit=5))
    assert document == {
        "type": f"urn:cellgate:error:{error.code}",
        "title": error("").title,
        "status": error.status,
        "code": error.code,
        "detail": "what happened",
        "retryable": error.retryable,
        "kernel_id": "k",
        "limit": 5,
    }
    answer = problems.response(error("what happened"))
    assert answer.status_code == error.status
    assert answer.media_type == "application/problem+json"
    assert ("www-authenticate" in answer.headers) == (error.status == 401)
    assert ("retry-after" in answer.headers) == (error.status in (429, 503) and error.retryable)


def test_waiting_helps_exactly_where_it_is_said() -> None:
    """A new class has to be put on one side by hand."""
    assert {error.code for error in ERRORS if error.retryable} == {
        "engine_unavailable",
        "kernel_unavailable",
        "no_capacity",
        "queue_full",
        "sandbox_timeout",
        "shutting_down",
        "start_failed",
        "start_timeout",
        "store_fenced",
        "store_unavailable",
        "too_many_kernels",
    }


def test_an_error_is_an_exception_with_its_text() -> None:
    error = ConfigurationError("port is taken", port=1)
    assert str(error) == error.detail == "port is taken"
    assert error.members == {"port": 1}
    assert isinstance(error, GatewayError)
