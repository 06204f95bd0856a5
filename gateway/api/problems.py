"""Errors as answers: the one place where exceptions become them. RFC 9457 problem documents, and on Jupyter's paths what its clients
know."""

from typing import Any

import orjson
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.api import jupyter_errors
from gateway.errors import GatewayError, InvalidRequest, MalformedBody, MethodNotAllowed, NotFound

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"


def document(error: GatewayError) -> dict[str, Any]:
    """The problem document of an error: https://www.rfc-editor.org/rfc/rfc9457#name-members-of-a-problem-detail."""
    return {
        "type": f"urn:cellgate:error:{error.code}",
        "title": error.title,
        "status": error.status,
        "code": error.code,
        "detail": error.detail,
        "retryable": error.retryable,
        **error.members,
    }


def encode(error: GatewayError) -> bytes:
    return orjson.dumps(document(error), default=str)


def response(error: GatewayError, jupyter: bool = False) -> Response:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="cellgate"'
    if error.status in (429, 503) and error.retryable:
        headers["Retry-After"] = "2"
    if jupyter:
        return Response(jupyter_errors.encode(error), jupyter_errors.status_of(error), headers, "application/json")
    return Response(encode(error), error.status, headers, MEDIA_TYPE)


def _answer(error: GatewayError, request: Request) -> Response:
    return response(error, jupyter_errors.speaks_jupyter(jupyter_errors.route_path(request.scope)))


def install(app: FastAPI) -> None:
    """Makes the app answer every exception with a problem document."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unexpected)


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return _answer(error, request)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(item["type"] == "json_invalid" for item in found):
        reason = next(item.get("ctx", {}).get("error", "") for item in found if item["type"] == "json_invalid")
        return _answer(MalformedBody(f"The body is not JSON: {reason}."), request)
    errors = [{"where": ".".join(str(part) for part in item["loc"]), "what": item["msg"]} for item in found[:20]]
    summary = "; ".join(f"{item['where']}: {item['what']}" for item in errors[:3])
    return _answer(InvalidRequest(f"{summary}.", errors=errors), request)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, GatewayError):
        return _answer(error.__cause__, request)
    if error.status_code == 405:
        answer = _answer(MethodNotAllowed(f"{request.method} is not for this route; see the Allow header."), request)
        answer.headers.update(error.headers or {})
        return answer
    if error.status_code == 404:
        return _answer(NotFound("There is no such route. GET /openapi.json lists all."), request)
    return _answer(MalformedBody("The body can't be read."), request)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected_error", path=request.scope["path"], exc_info=error)
    return _answer(GatewayError("The gateway met an error of its own; its log has the details."), request)
