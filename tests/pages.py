"""The documentation pages that are made from code, so that they can't say something else than the code does."""

import ast
import inspect
import sys
from pathlib import Path

from gateway import settings
from gateway.errors import GatewayError, all_errors

_HEAD = """# Errors

Made from `gateway/errors.py` by `scripts/docs`. Every error of the API is a problem document (RFC 9457) with one of these codes.

| code | HTTP | WebSocket close | retry | meaning |
| --- | --- | --- | --- | --- |
"""


def errors() -> str:
    """docs/errors.md"""
    return _HEAD + "".join(f"{_row(error)}\n" for error in all_errors() if error.__module__ == "gateway.errors")


def _row(error: type[GatewayError]) -> str:
    title = (error.__doc__ or "").strip()
    retry = "yes" if error.retryable else "no"
    return f"| `{error.code}` | {error.status} | {error.ws_close} | {retry} | {title} |"


_SETTINGS_HEAD = """# Settings

Made from `gateway/settings.py` by `scripts/docs`. Strongest first: command-line flags, environment variables, the TOML file
named by `--config` or `CELLGATE_CONFIG`. A setting `b` of the group `a` is `CELLGATE_A__B` in the environment and `b` in the
table `[a]` of the file. Kernel specs are tables `[kernels.specs.NAME]`, their limits `[kernels.specs.NAME.limits]` and
`[kernels.specs.NAME.maximum]`. Sizes are bytes, or a number with k, m or g; times are seconds.
The variables of Jupyter Kernel Gateway and Enterprise Gateway in the last table come after the environment variables above and before the file.
"""
_ALIASES_HEAD = """
## Variables of other gateways

Where both are set the first counts. Lists are separated by commas, an empty value is none.

| variable | setting |
| --- | --- |
"""
_GROUPS = {
    "Settings": "top level",
    "ServerSettings": "`server`",
    "KernelSettings": "`kernels`",
    "KernelSpecSettings": "`kernels.specs.NAME`",
    "LimitSettings": "`limits` and `maximum` of a spec",
    "JupyterSettings": "`jupyter`",
    "CullingSettings": "`culling`",
    "LinkSettings": "`link`",
    "DockerSettings": "`docker`",
}


def settings_page() -> str:
    """docs/settings.md: every field with its default as written and its docstring."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef)}
    groups = "".join(_group(classes[name], title) for name, title in _GROUPS.items())
    rows = "".join(f"| `KG_{alias}`, `EG_{alias}` | `{name}` |\n" for alias, name in settings.JUPYTER_ALIASES.items())
    return f"{_SETTINGS_HEAD}{groups}{_ALIASES_HEAD}{rows}"


def _group(node: ast.ClassDef, title: str) -> str:
    head = f"\n## {title}\n\n{_flat(ast.get_docstring(node) or '')}\n\n| setting | default | |\n| --- | --- | --- |\n"
    rows = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            rows.append(f"| `{statement.target.id}` | `{_default(statement)}` | {_docstring(following)} |\n")
    return head + "".join(rows)


def _default(statement: ast.AnnAssign) -> str:
    value = statement.value
    if isinstance(value, ast.Call):
        given = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        value = given or value
    return ast.unparse(value).replace("|", "\\|") if value is not None else ""


def _docstring(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return _flat(str(statement.value.value)).replace("|", "\\|")
    return ""


def _flat(text: str) -> str:
    return " ".join(text.split())


PAGES = {"errors.md": errors, "settings.md": settings_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        Path(sys.argv[1], name).write_text(make())
