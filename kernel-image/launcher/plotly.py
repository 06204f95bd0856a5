"""Keeps plotly's 4.8 MB library out of the outputs, also for those who ask for it by an old habit.

`PLOTLY_RENDERER` already makes a figure travel as data. But `init_notebook_mode()`, in many a notebook from before, puts
the whole library into an output of its own, and `show("notebook")` does so again. There is no setting for it, so the
renderer behind both is exchanged, as soon as plotly is imported, for plotly's own that links to the library.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

RENDERERS = "plotly.io._renderers"


def install() -> None:
    """Wait for plotly; costs nothing where it is never imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    # Not derived from importlib.abc's, which would load importlib.resources at every start.
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname != RENDERERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec and spec.origin:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        renderers = getattr(module, "renderers", None)
        if renderers and "notebook_connected" in renderers:
            renderers["notebook"] = renderers["notebook_connected"]
