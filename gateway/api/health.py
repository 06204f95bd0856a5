"""Whether the gateway answers: the only route without a token, and so it says nothing else."""

from fastapi import APIRouter
from pydantic import BaseModel

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: str


@router.get("/healthz", summary="The gateway answers", openapi_extra={"security": []})
async def healthz() -> Health:
    return Health(status="ok")
