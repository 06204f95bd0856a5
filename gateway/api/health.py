"""Whether the gateway answers: the only route without a token, and so it says nothing else."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from gateway.api.dependencies import Manager

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok", "stopping"]


@router.get("/healthz", summary="The gateway answers; while it stops it takes no new work", openapi_extra={"security": []})
async def healthz(manager: Manager) -> Health:
    return Health(status="stopping" if manager.stopping else "ok")
