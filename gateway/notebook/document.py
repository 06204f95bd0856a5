"""A notebook as a file: read, checked and brought to the current format; made ready to run; written back.

Outputs come from cell code: whatever they hold, the notebook that a run has paid for is written.
"""

import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

_nbformat: Any = nbformat
"""nbformat has few types; this module is the one that calls it."""

SKIP_TAG = "skip-execution"
RAISES_TAG = "raises-exception"


_MALFORMED = (nbformat.ValidationError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""nbformat meets a malformed file with its own error or with whatever its code trips over."""


class NotebookError(Exception):
    """The notebook can't be used; the message says why and what to do."""


def read(path: Path) -> NotebookNode:
    """The notebook in the newest nbformat 4, valid; raises `NotebookError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotebookError(f"There is no notebook at {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotebookError(f"{path} can't be read: {error}") from None
    try:
        notebook: NotebookNode = _nbformat.v4.upgrade(_nbformat.reads(text, as_version=4))
        _, notebook = _nbformat.validator.normalize(notebook, version=4, version_minor=notebook.nbformat_minor)
        _nbformat.validate(notebook)
    except (json.JSONDecodeError, nbformat.reader.NotJSONError):
        raise NotebookError(f"{path} is not a notebook: it is no JSON.") from None
    except _MALFORMED as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotebookError(f"{path} is not a valid notebook: {line}") from None
    return notebook


def write(notebook: NotebookNode, path: Path) -> None:
    """Write it whole or not at all: an interrupted write leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    text: str = _nbformat.v4.writes(notebook)
    part.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    os.replace(part, path)


def clear(notebook: NotebookNode) -> None:
    """Take away what an earlier run left, so that no old output passes for a new one. Skipped cells keep theirs."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and SKIP_TAG not in tags(cell):
            cell.outputs = []
            cell.execution_count = None
            cell.metadata.pop("execution", None)


def new_code_cell(source: str, cell_tags: list[str]) -> NotebookNode:
    cell: NotebookNode = _nbformat.v4.new_code_cell(source, metadata={"tags": cell_tags})
    return cell


def to_nodes(outputs: list[dict[str, Any]]) -> list[NotebookNode]:
    nodes: list[NotebookNode] = _nbformat.from_dict(outputs)
    return nodes


def tags(cell: NotebookNode) -> list[str]:
    found = cell.metadata.get("tags", [])
    return found if isinstance(found, list) else []


def cells_to_run(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells that will be executed, in order: not the empty ones, not those tagged `skip-execution`."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip() and SKIP_TAG not in tags(cell)]


def spec_name(notebook: NotebookNode) -> str:
    """Name of the kernelspec that the notebook was made with; empty when it doesn't say."""
    return str(_metadata(notebook, "kernelspec").get("name", ""))


def language(notebook: NotebookNode) -> str:
    """The language in lower case; Python when the notebook doesn't say."""
    found = _metadata(notebook, "language_info").get("name") or _metadata(notebook, "kernelspec").get("language")
    return str(found or "python").lower()


def _metadata(notebook: NotebookNode, key: str) -> dict[str, Any]:
    found = notebook.metadata.get(key)
    return found if isinstance(found, dict) else {}
