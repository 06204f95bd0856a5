"""Values from the command line into a notebook, the way papermill does it.

A cell tagged `parameters` holds the defaults; the given values are assigned in a cell tagged `injected-parameters`
right after it, so that the executed notebook shows both.
"""

import ast
import json
import keyword
import re
from typing import Any

from nbformat import NotebookNode

from gateway.notebook.document import NotebookError, language, new_code_cell, tags

PARAMETERS_TAG = "parameters"
INJECTED_TAG = "injected-parameters"

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None, "~": None}
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")
_SPECIAL = re.compile(r"[+-]?\.?(inf|nan)", re.IGNORECASE)


def parse(assignments: list[str]) -> dict[str, Any]:
    """`["n=3", "name=north", "days=[1, 2]"]` -> values; raises `NotebookError` for what is no assignment."""
    found: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise NotebookError(f"--param {text!r} is not NAME=VALUE with a Python name.")
        found[name] = parse_value(value)
    return found


def parse_value(text: str) -> Any:
    """Text -> int, float, bool, None, list, dict or str.

    As YAML reads a scalar, but what is not plainly a number stays text: `007`, `1_000`, `2024-01-01`, `no`. Double
    quotes force text.
    """
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    if _INTEGER.fullmatch(stripped):
        return int(stripped)
    if _FLOAT.fullmatch(stripped):
        return float(stripped)
    if _SPECIAL.fullmatch(stripped):
        return float(stripped.replace(".", ""))
    if stripped[:1] in ("[", "{", '"'):
        try:
            return json.loads(stripped)
        except ValueError:
            if stripped[0] != '"':
                raise NotebookError(f"The parameter value {text!r} begins like JSON, but is none.") from None
    return text


def inject(notebook: NotebookNode, values: dict[str, Any]) -> list[str]:
    """Put the cell in; returns what the user should know: no `parameters` cell, or a name that it doesn't hold."""
    if language(notebook) != "python":
        raise NotebookError(f"Parameters are written as Python code; this notebook is in {language(notebook)}.")
    code = "# Parameters\n" + "\n".join(f"{name} = {_literal(value)}" for name, value in values.items())
    cell = new_code_cell(code, [INJECTED_TAG])
    defaults = _tagged(notebook, PARAMETERS_TAG)
    earlier = _tagged(notebook, INJECTED_TAG)
    if earlier is not None:
        notebook.cells[earlier] = cell
    else:
        notebook.cells.insert(0 if defaults is None else defaults + 1, cell)
    if defaults is None:
        return ["The notebook has no cell tagged `parameters`; the values are set before its first cell."]
    unknown = set(values) - _names(notebook.cells[defaults].source)
    return [f"The `parameters` cell sets no {name!r}; is the name right?" for name in sorted(unknown)]


def _tagged(notebook: NotebookNode, tag: str) -> int | None:
    return next((i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and tag in tags(cell)), None)


def _literal(value: Any) -> str:
    """Python code for a value; infinities and NaN have no literal of their own."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return f'float("{value}")'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _names(source: str) -> set[str]:
    """Names that a cell assigns; all of them unknown when it is no plain Python."""
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:
        return set()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
