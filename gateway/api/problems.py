"""Errors on the native API: RFC 9457 problem documents, and the one place where exceptions become them."""

from typing import Any

import orjson
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

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


def response(error: GatewayError) -> Response:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="cellgate"'
    if error.status in (429, 503) and error.retryable:
        headers["Retry-After"] = "2"
    return Response(encode(error), error.status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Makes the app answer every exception with a problem document."""
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unexpected)


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return response(error)


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(item["type"] == "json_invalid" for item in found):
        reason = next(item.get("ctx", {}).get("error", "") for item in found if item["type"] == "json_invalid")
        return response(MalformedBody(f"The body is not JSON: {reason}."))
    errors = [{"where": ".".join(str(part) for part in item["loc"]), "what": item["msg"]} for item in found[:20]]
    summary = "; ".join(f"{item['where']}: {item['what']}" for item in errors[:3])
    return response(InvalidRequest(f"{summary}.", errors=errors))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, GatewayError):
        return response(error.__cause__)
    if error.status_code == 405:
        answer = response(MethodNotAllowed(f"{request.method} is not for this route; see the Allow header."))
        answer.headers.update(error.headers or {})
        return answer
    if error.status_code == 404:
        return response(NotFound("There is no such route. GET /openapi.json lists all."))
    return response(MalformedBody("The body can't be read."))


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected_error", path=request.url.path, exc_info=error)
    return response(GatewayError("The gateway met an error of its own; its log has the details."))
