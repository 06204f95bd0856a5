"""The one Settings tree: everything an operator can choose, with its unit, its default and the reason for it.

Sources, strongest first: command-line flags (passed as arguments), ``CELLGATE_`` environment variables (``__`` between
levels: ``CELLGATE_SERVER__PORT=9000``), the ``KG_`` and ``EG_`` variables of Jupyter's own gateways (`JUPYTER_ALIASES`), the TOML file
named by ``CELLGATE_CONFIG`` or ``--config``. No other module reads the environment. The tree is frozen: what was true at the start
stays true.
"""

import os
import re
import tomllib
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from gateway.errors import ConfigurationError

MIB = 1024 * 1024
_UNITS = {"k": 1024, "m": MIB, "g": 1024 * MIB}


def parse_size(value: object) -> int:
    """``"512m"``, ``"1.5g"``, ``"64k"`` or a number of bytes -> bytes; raises ValueError with the accepted forms."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip().lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(text[-1:], 1)
    digits = text[:-1] if unit > 1 else text
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError("a size is a number of bytes, or a number with k, m or g: 512m, 1.5g") from None


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _path_prefix(value: str) -> str:
    """``user/x`` -> ``/user/x/``, empty -> ``/``."""
    parts = [part for part in value.split("/") if part]
    if any(re.fullmatch(r"[A-Za-z0-9._~@-]+", part) is None or set(part) == {"."} for part in parts):
        raise ValueError("a base URL is a path of letters, digits and . _ ~ @ -, as /user/x/")
    return "/".join(("", *parts, ""))


class ServerSettings(_Frozen):
    """Where the gateway listens and what it takes from clients."""

    host: str = "127.0.0.1"
    port: int = Field(default=8890, ge=0, le=65535)
    """0 lets the system choose; the chosen one is printed."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers accepted besides loopback names and the listening address (against DNS rebinding)."""
    base_url: Annotated[str, AfterValidator(_path_prefix)] = "/"
    """The path under which everything is served, as ``/user/x/``, when a proxy passes it on."""
    allowed_origins: tuple[str, ...] = ()
    """Exact browser origins that may call the API, for example ``https://lab.example``; ``*``: any, which needs a token."""
    cors_headers: tuple[str, ...] = (
        "Accept",
        "Authorization",
        "Content-Type",
        "Idempotency-Key",
        "Last-Event-ID",
        "Prefer",
        "X-XSRFToken",
    )
    """Request headers that pages of the allowed origins may send."""
    cors_methods: tuple[str, ...] = ("GET", "POST", "PUT", "PATCH", "DELETE")
    cors_expose_headers: tuple[str, ...] = ("Location", "Retry-After", "Idempotency-Replayed")
    """Headers of answers that pages of the allowed origins may read."""
    cors_credentials: bool = False
    """Whether those pages may send cookies and client certificates. The gateway has no use for either; a proxy before it may."""
    cors_max_age: int = Field(default=600, ge=0)
    """Seconds for which a browser may remember what it was allowed."""
    max_body: int = 16 * MIB
    """Bytes of a JSON body. Files are streamed and bounded by the sandbox's own disk limit."""
    max_upload: int = 4096 * MIB
    """Bytes of one uploaded file; the sandbox's disk limit is usually met first."""
    body_timeout: float = 30.0
    """Seconds that a client may take between two pieces of a body."""
    ws_max_message: int = 16 * MIB
    ws_ping_interval: float = 20.0
    """Seconds between WebSocket pings; keeps proxies awake and finds half-open connections."""
    on_shutdown: Literal["detach", "stop"] = "detach"
    """What becomes of the kernels when the gateway is told to stop: they wait for the next gateway on the same state directory, or
    they end."""
    drain_timeout: float = Field(default=10.0, ge=0)
    """Seconds that running cells get to end when the gateway is told to stop; new work is refused meanwhile."""
    shutdown_grace: float = 5.0
    """Seconds that open requests get after that, to read how their cells have ended."""


class JupyterSettings(_Frozen):
    """What Jupyter's clients may ask for at ``/api``."""

    client_envs: tuple[str, ...] = ()
    """Names of variables that a client may set for its kernel besides ``KERNEL_…``; ``*``: any. Others are ignored."""
    launch_timeout: float = Field(default=0.0, ge=0)
    """Seconds in which a kernel has to be ready when its request names no KERNEL_LAUNCH_TIMEOUT; 0, and at most: the spec's
    `start_timeout`."""


class LimitSettings(_Frozen):
    """What one sandbox may use. `memory` and `disk` in bytes, `cpus` in cores."""

    memory: Annotated[int, AfterValidator(int)] = 1024 * MIB
    cpus: float = Field(default=1.0, gt=0)
    pids: int = Field(default=128, ge=32)

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, data: Any) -> Any:
        if isinstance(data, dict) and "memory" in data:
            data = {**data, "memory": parse_size(data["memory"])}
        return data


class KernelSpecSettings(_Frozen):
    """One thing that can be started: an image, a kernelspec inside it, limits and deadlines (seconds)."""

    display_name: str = "Python 3"
    language: str = "python"
    image: str = "cellgate-kernel:latest"
    kernelspec: str = "python3"
    """Name of the Jupyter kernelspec inside the image."""
    limits: LimitSettings = LimitSettings()
    maximum: LimitSettings = LimitSettings(memory=4096 * MIB, cpus=4.0, pids=512)
    work_size: int = 256 * MIB
    """Bytes of the work directory. It is memory: what is stored there counts toward `memory`."""
    tmp_size: int = 128 * MIB
    shm_size: int = 64 * MIB
    env: dict[str, str] = {}
    start_timeout: float = 60.0
    cell_timeout: float = 600.0
    """Seconds a cell may run when its request names no timeout."""
    cell_timeout_maximum: float = 86_400.0
    idle_timeout: float | None = None
    """Seconds without a request after which a kernel is culled; None: `culling.cull_idle_timeout`; 0: never."""
    idle_timeout_maximum: float = 86_400.0
    """The most that a request may ask for; 0: as long as it likes, or never."""
    lifetime: float = 43_200.0
    """Seconds after which a sandbox ends, gateway or no gateway."""
    lifetime_maximum: float = 604_800.0
    """Seconds up to which a request or a keep-alive may extend the lifetime, from the start."""
    busy_timeout: float = 0.0
    """Seconds that a kernel may be busy without a pause, over any number of cells; 0: no limit."""
    silence: float = 3600.0
    """Seconds without a gateway after which a sandbox ends by itself, so that no orphan lives on: how long kernels wait for the
    next gateway."""

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, data: Any) -> Any:
        if isinstance(data, dict):
            sizes = {k: parse_size(data[k]) for k in ("work_size", "tmp_size", "shm_size") if k in data}
            data = {**data, **sizes}
        return data

    @model_validator(mode="after")
    def _ordered(self) -> "KernelSpecSettings":
        low, high = self.limits, self.maximum
        if low.memory > high.memory or low.cpus > high.cpus or low.pids > high.pids:
            raise ValueError("limits are above maximum")
        if self.cell_timeout > self.cell_timeout_maximum:
            raise ValueError("cell_timeout is above cell_timeout_maximum")
        if self.lifetime > self.lifetime_maximum:
            raise ValueError("lifetime is above lifetime_maximum")
        return self


class CullingSettings(_Frozen):
    """Which kernels are ended for doing nothing. Names and meaning are Jupyter's; times in seconds."""

    cull_idle_timeout: float = Field(default=3600.0, ge=0)
    """0: idle kernels live on until their lifetime ends."""
    cull_interval: float = Field(default=5.0, gt=0)
    """How often the culler looks; a kernel may outlive its time by so much."""
    cull_connected: bool = True
    """Whether an open WebSocket keeps an idle kernel. It does not by default: clients leave sockets open for days."""
    cull_busy: bool = False
    """Whether a running cell counts as idle when nobody has asked for anything. Cells have a timeout of their own."""
    freeze_after: float = Field(default=0.0, ge=0)
    """Idle seconds after which a sandbox is frozen (it keeps its memory and gets no CPU); the next request thaws it. 0: never."""
    keep_tombstones: float = 86_400.0
    """How long it is remembered why a kernel ended."""
    max_tombstones: int = Field(default=1000, ge=1)


class KernelSettings(_Frozen):
    """Kernels and their executions."""

    default_spec: str = "python3"
    specs: dict[str, KernelSpecSettings] = {"python3": KernelSpecSettings()}
    max_kernels: int = Field(default=32, ge=1)
    max_parallel_starts: int = Field(default=4, ge=1)
    """Starting is CPU-bound; more than two a core only stretches every start."""
    max_queue: int = Field(default=64, ge=1)
    """Executions waiting behind the running one, per kernel."""
    max_code: int = 1 * MIB
    """Bytes of one cell's code, in UTF-8."""
    memory_overcommit: float = Field(default=1.5, gt=0)
    """Memory that kernels are promised together, as a multiple of what the engine's machine has."""
    max_output: int = 256 * MIB
    """Bytes of output kept per execution, the first half from its beginning and the second from its end; a `truncated`
    event between them counts what was left out."""
    max_output_events: int = Field(default=100_000, ge=16)
    """The same for the number of events."""
    output_rate: int = Field(default=0, ge=0)
    """Bytes a second that a kernel may send; a faster one is slowed down, nothing is dropped. 0: no limit."""
    max_restarts: int = Field(default=3, ge=0)
    """Dead kernels that the next cell may bring back within `restart_window` seconds; past it only a restart by hand does."""
    restart_window: float = 120.0
    max_kept_output: int = 64 * MIB
    """Bytes of output of finished executions that are kept in memory per kernel; older ones are read from the store."""
    reconcile_interval: float = Field(default=5.0, gt=0)
    """How often the sandboxes there are get compared with the kernels there should be."""
    interrupt_grace: float = 5.0
    """Seconds between the steps that end a cell past its deadline."""
    shutdown_timeout: float = 10.0
    """Seconds for removing the sandboxes when the gateway stops."""

    @model_validator(mode="after")
    def _default_exists(self) -> "KernelSettings":
        if self.default_spec not in self.specs:
            raise ValueError(f"default_spec {self.default_spec!r} is not among specs")
        return self


class StoreSettings(_Frozen):
    """What is remembered of kernels and executions, and for how long."""

    kind: Literal["sqlite", "memory"] = "sqlite"
    """`sqlite` is a file in the state directory; with `memory` nothing survives the gateway, and kernels are ended with it."""
    path: Path | None = None
    """The SQLite file; None: ``state_dir/store.sqlite3``. On a local disk: SQLite's locks do not work on network file systems."""
    keep: float = Field(default=604_800.0, ge=0)
    """Seconds that an ended execution can still be read."""
    max_size: int = Field(default=4096 * MIB, ge=MIB)
    """Bytes of everything stored; past it the oldest ended executions go first. Looked at every few seconds, and running executions
    stay: leave room for `kernels.max_output` bytes for each kernel."""
    lock_wait: float = Field(default=0.0, ge=0)
    """Seconds to wait at the start for another gateway on the same state directory to end; 0: refuse to start at once."""


class LinkSettings(_Frozen):
    """Bounds on what a supervisor may send. Bytes and seconds."""

    max_frame: int = 128 * MIB
    max_parts: int = Field(default=4096, ge=8)
    """Parts of one message: six, and one for each binary buffer of a widget."""
    max_unacknowledged: int = 32 * MIB
    """Bytes the supervisor keeps until they are stored."""
    overflow: Literal["wait", "drop"] = "wait"
    """Past `max_unacknowledged`: `wait` holds the kernel up until a gateway takes the output, `drop` lets it go on and leaves
    outputs out, told by a `gap` event with their exact number."""
    handshake_timeout: float = 10.0
    ping_interval: float = 10.0
    lost_timeout: float = 30.0
    """Seconds without a word from a supervisor before its sandbox is given up, although the engine says that it runs."""
    command_timeout: float = 15.0


class DockerSettings(_Frozen):
    """The Docker engine. `url` empty means DOCKER_HOST or the local socket, as the docker command does."""

    url: str = ""
    runtime: str = "runc"
    link: Literal["auto", "socket", "stdio"] = "auto"
    """`socket` mounts a directory of this host read-only; `stdio` needs no shared path; `auto` takes the first where it works."""
    timeout: float = 30.0
    """Seconds per engine call."""
    parallel_calls: int = Field(default=8, ge=1)


def _default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/cellgate")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "cellgate"


_LISTS = re.compile(r"allowed_origins|cors_(headers|methods|expose_headers)|client_envs")
JUPYTER_ALIASES: dict[str, str] = {
    "AUTH_TOKEN": "token",
    "IP": "server.host",
    "PORT": "server.port",
    "BASE_URL": "server.base_url",
    "ALLOW_ORIGIN": "server.allowed_origins",
    "ALLOW_HEADERS": "server.cors_headers",
    "ALLOW_METHODS": "server.cors_methods",
    "EXPOSE_HEADERS": "server.cors_expose_headers",
    "ALLOW_CREDENTIALS": "server.cors_credentials",
    "MAX_AGE": "server.cors_max_age",
    "MAX_KERNELS": "kernels.max_kernels",
    "DEFAULT_KERNEL_NAME": "kernels.default_spec",
    "CULL_IDLE_TIMEOUT": "culling.cull_idle_timeout",
    "CULL_INTERVAL": "culling.cull_interval",
    "CULL_CONNECTED": "culling.cull_connected",
    "ENV_WHITELIST": "jupyter.client_envs",
    "CLIENT_ENVS": "jupyter.client_envs",
    "KERNEL_LAUNCH_TIMEOUT": "jupyter.launch_timeout",
}
"""What follows ``KG_`` or ``EG_`` -> the setting. Lists are separated by commas; an empty value is none."""


class _JupyterEnvironment(PydanticBaseSettingsSource):
    """The variables of Jupyter Kernel Gateway and Enterprise Gateway, so that a deployment of theirs starts with few changes."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for alias, setting in JUPYTER_ALIASES.items():
            value = os.environ.get(f"KG_{alias}") or os.environ.get(f"EG_{alias}")
            if not value:
                continue
            group, _, name = setting.rpartition(".")
            table = found.setdefault(group, {}) if group else found
            table[name] = [item for item in re.split(r"[,\s]+", value) if item] if _LISTS.fullmatch(name) else value
        return found


class Settings(BaseSettings):
    """Everything. Frozen; build it with `load`."""

    model_config = SettingsConfigDict(
        env_prefix="CELLGATE_", env_nested_delimiter="__", frozen=True, extra="forbid", nested_model_default_partial_update=True
    )

    state_dir: Path = Field(default_factory=_default_state_dir)
    """Holds the token, the store and the link sockets; one gateway at a time may use it. Its path must stay short: a Unix socket
    path ends at 107 bytes."""
    token: Annotated[str, AfterValidator(str.strip)] = ""
    """The bearer token. Empty: made at the first start and kept in ``state_dir/token`` (mode 0600)."""
    auth: Literal["token", "none"] = "token"
    """`none` lets anyone on this machine in who reaches the port; refused on any address but loopback."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    server: ServerSettings = ServerSettings()
    kernels: KernelSettings = KernelSettings()
    jupyter: JupyterSettings = JupyterSettings()
    culling: CullingSettings = CullingSettings()
    store: StoreSettings = StoreSettings()
    link: LinkSettings = LinkSettings()
    docker: DockerSettings = DockerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = (init_settings, env_settings, _JupyterEnvironment(settings_cls))
        file = _config_file.get()
        return sources if file is None else (*sources, TomlConfigSettingsSource(settings_cls, file))


_config_file: ContextVar[Path | None] = ContextVar("_config_file", default=None)
"""The TOML file while `load` runs: pydantic-settings takes sources per class, and the file is known only per call."""


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Settings from file, environment and `overrides` (nested dicts); raises `ConfigurationError` naming each wrong value."""
    named = config or os.environ.get("CELLGATE_CONFIG")
    file = Path(named) if named else None
    if file is not None and not file.is_file():
        raise ConfigurationError(f"The configuration file {file} does not exist.")
    token = _config_file.set(file)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
        raise ConfigurationError("The configuration is not valid: " + "; ".join(lines)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The configuration file {file} is not TOML: {error}") from None
    finally:
        _config_file.reset(token)
