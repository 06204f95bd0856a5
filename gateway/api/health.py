"""Whether the gateway answers: the only route without a token, and so it says nothing else."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from gateway.api.dependencies import Manager

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok", "stopping", "degraded"]


@router.get(
    "/healthz",
    summary="The gateway answers; `stopping` takes no new work, `degraded` may be unable to",
    openapi_extra={"security": []},
)
async def healthz(manager: Manager) -> Health:
    if manager.stopping:
        return Health(status="stopping")
    return Health(status="degraded" if manager.degraded else "ok")
