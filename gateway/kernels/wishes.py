"""What a client asks for, held against what the operator allows: defaults filled in, everything above a maximum refused."""

from dataclasses import dataclass, field
from typing import Literal

from gateway.errors import LimitExceeded, SpecNotFound
from gateway.sandboxes.base import Limits
from gateway.settings import MIB, KernelSpecSettings, Settings

MINIMUM_MEMORY = 128 * MIB
"""Below this not even an idle kernel with its supervisor fits."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a client asks for; None means the spec's default. Memory in bytes, cpus in cores, times in seconds."""

    spec: str | None = None
    memory: int | None = None
    cpus: float | None = None
    pids: int | None = None
    idle_timeout: float | None = None
    lifetime: float | None = None
    on_death: Literal["restart", "stay"] = "restart"
    env: dict[str, str] = field(default_factory=dict)
    label: str = ""
    kernel_id: str | None = None
    """A UUID that the kernel is to have; None: one is made."""
    start_timeout: float | None = None
    """Seconds in which it has to answer, if that is less than the spec gives it."""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What to start. Limits and times (seconds, 0: none) are within the spec's maximum already."""

    spec_name: str
    spec: KernelSpecSettings
    limits: Limits
    env: dict[str, str]
    label: str
    idle_timeout: float
    lifetime: float
    on_death: Literal["restart", "stay"] = "restart"


def grant(request: CreateRequest, settings: Settings) -> KernelRequest:
    """Raises `SpecNotFound`, `LimitExceeded`."""
    name = request.spec or settings.kernels.default_spec
    spec = settings.kernels.specs.get(name)
    if spec is None:
        names = [*settings.kernels.specs]
        raise SpecNotFound(f"There is no kernel spec '{name[:64]}'; there are: {', '.join(names)}.", specs=names)
    if request.start_timeout is not None:
        spec = spec.model_copy(update={"start_timeout": min(request.start_timeout, spec.start_timeout)})
    high = spec.maximum
    limits = Limits(
        memory=int(_within("memory", request.memory, spec.limits.memory, MINIMUM_MEMORY, high.memory)),
        cpus=_within("cpus", request.cpus, spec.limits.cpus, 0.1, high.cpus),
        pids=int(_within("pids", request.pids, spec.limits.pids, 32, high.pids)),
    )
    return KernelRequest(
        spec_name=name,
        spec=spec,
        limits=limits,
        env=dict(request.env),
        label=request.label,
        idle_timeout=_idle_timeout(request.idle_timeout, spec, settings),
        lifetime=_within("lifetime", request.lifetime, spec.lifetime, 1, spec.lifetime_maximum),
        on_death=request.on_death,
    )


def lifetime_left(wanted: float | None, age: float, spec: KernelSpecSettings) -> float | None:
    """Seconds from now that a keep-alive may grant; raises `LimitExceeded`."""
    if wanted is None:
        return None
    return _within("lifetime", wanted, wanted, 1, spec.lifetime_maximum - age)


def _idle_timeout(wanted: float | None, spec: KernelSpecSettings, settings: Settings) -> float:
    """0 means never, which only an operator without a maximum allows."""
    default = settings.culling.cull_idle_timeout if spec.idle_timeout is None else spec.idle_timeout
    if wanted is None or not spec.idle_timeout_maximum:
        return default if wanted is None else wanted
    return _within("idle_timeout", wanted, default, 1, spec.idle_timeout_maximum)


def _within(name: str, wanted: float | None, default: float, low: float, high: float) -> float:
    if wanted is None:
        return default
    if not low <= wanted <= high:
        show = _mebibytes if name == "memory" else _plain
        text = f"{name} {show(wanted)} is not between {show(low)} and {show(high)}."
        raise LimitExceeded(text, limit=name, minimum=low, maximum=high)
    return wanted


def _mebibytes(value: float) -> str:
    return f"{value / MIB:.1f} MiB".replace(".0 ", " ")


def _plain(value: float) -> str:
    return f"{value:,.10g}".replace(",", "")
