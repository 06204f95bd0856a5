"""Jupyter's kernelspecs, and the pictures that a launcher shows for them."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.api.dependencies import Manager
from gateway.api.jupyter_models import LOGOS, spec_model
from gateway.errors import NotFound, SpecNotFound
from gateway.kernels.manager import KernelManager
from gateway.settings import KernelSpecSettings

router = APIRouter(include_in_schema=False)

_MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}
_FILES = {file: (Path(__file__).parent / "logos" / file).read_bytes() for file in LOGOS.values()}


@router.get("/api/kernelspecs")
async def list_specs(manager: Manager, request: Request) -> dict[str, Any]:
    base = request.scope.get("root_path", "")
    specs = {name: spec_model(name, spec, base) for name, spec in manager.specs().items()}
    return {"default": manager.default_spec, "kernelspecs": specs}


@router.get("/api/kernelspecs/{name}")
async def get_spec(name: str, manager: Manager, request: Request) -> dict[str, Any]:
    return spec_model(name, _spec(name, manager), request.scope.get("root_path", ""))


@router.get("/kernelspecs/{name}/{file}")
async def get_resource(name: str, file: str, manager: Manager) -> Response:
    _spec(name, manager)
    if file not in _FILES:
        raise NotFound("This kernelspec has no such file.")
    return Response(_FILES[file], media_type=_MEDIA[Path(file).suffix])


def _spec(name: str, manager: KernelManager) -> KernelSpecSettings:
    spec = manager.specs().get(name)
    if spec is None:
        raise SpecNotFound(f"Kernel spec not found: {name[:64]}")
    return spec
