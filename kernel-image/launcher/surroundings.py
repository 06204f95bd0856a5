"""What must be in place before the first import: how many CPUs there are and where caches go.

Libraries size their pools by the machine, not by the share of it that the sandbox may use: on a 64-core host a
one-CPU kernel would start 64 threads that mostly wait for each other, and run into the limit on processes.
"""

import os
import resource
import shutil
import sys
import tempfile
from math import ceil
from pathlib import Path

CPUS = "CELLGATE_CPUS"  # the sandbox's CPU limit, a float, set by the supervisor

THREAD_POOLS = (
    "OMP_NUM_THREADS",  # OpenMP (scikit-learn) and Arrow's CPU pool
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NUMBA_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",  # joblib's n_jobs=-1
    "PYTHON_CPU_COUNT",  # os.cpu_count() of Python 3.13 and up
)

# The image's root is read-only: everything that wants to write below the home directory goes to the tmpfs.
DIRECTORIES = {
    "HOME": "/tmp/home",
    "IPYTHONDIR": "/tmp/ipython",
    "MPLCONFIGDIR": "/tmp/matplotlib",
}

DEFAULTS = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # The figure as data. Plotly's other notebook renderers send their 4.8 MB library along with the figure.
    "PLOTLY_RENDERER": "plotly_mimetype",
    # Arrow's own pool reserves a gigabyte at once, which would use up what `_limit_memory` leaves.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}

# cgroup v2, v1
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PRACTICALLY_NONE = 1 << 50
# Bytes above the sandbox's memory that the kernel may reserve: stacks and allocators' pools that are never filled count as
# data too. With less, small allocations fail near the limit, and neither Python nor OpenMP survives that; there the
# cgroup's kill, which is told with its cause, is the better end. What fails is what could never fit.
SLACK = 1024 * 1024 * 1024

# Made while the image was built: otherwise the first pyplot import searches all fonts.
FONT_LISTS = Path(sys.prefix, "share", "cellgate", "matplotlib")


def prepare() -> None:
    """Set up this process; what the environment already says is kept."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _limit_threads()
    _limit_memory()
    _make_directories()
    # Said, not searched for: the search writes a file, and a kernel has to start on a full disk too.
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")


def _limit_threads() -> None:
    limit = os.environ.get(CPUS)
    if not limit:
        return
    cpus = max(1, ceil(float(limit)))
    for name in THREAD_POOLS:
        os.environ.setdefault(name, str(cpus))
    # multiprocessing.Pool() and ProcessPoolExecutor() ask this and start that many processes at once.
    os.cpu_count = lambda: cpus


def _limit_memory() -> None:
    """Lets an allocation that can't fit fail with MemoryError, where the cgroup would kill the kernel with all its variables."""
    limit = _cgroup_limit()
    if limit and limit < PRACTICALLY_NONE:
        resource.setrlimit(resource.RLIMIT_DATA, (limit + SLACK, limit + SLACK))


def _cgroup_limit() -> int | None:
    for path in CGROUP_LIMITS:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _make_directories() -> None:
    for name, default in DIRECTORIES.items():
        Path(os.environ.setdefault(name, default)).mkdir(mode=0o700, parents=True, exist_ok=True)
    for fonts in FONT_LISTS.glob("fontlist-*.json"):
        target = Path(os.environ["MPLCONFIGDIR"], fonts.name)
        if not target.exists():
            shutil.copyfile(fonts, target)
