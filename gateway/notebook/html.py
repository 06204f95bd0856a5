"""An executed notebook as one HTML file that needs nothing else: no network, no files beside it.

nbconvert's own page loads require.js, MathJax and Mermaid from other servers. Here these are left out (formulas stand
as their LaTeX text), and a Content-Security-Policy forbids the page to fetch anything, so no output can do it either.
"""

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

from nbformat import NotebookNode

from gateway.notebook.terminal import settled

POLICY = (
    "default-src 'none'; img-src data: blob:; media-src data:; font-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'; worker-src blob:; form-action 'none'; base-uri 'none'"
)

TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head -%}
<meta http-equiv="Content-Security-Policy" content="POLICY">
{{ super() }}
{%- endblock -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
""".replace("POLICY", POLICY)


class HTMLError(Exception):
    """The page can't be made; the message says why and what to do."""


def require() -> None:
    """Raises `HTMLError` when nbconvert is missing: better told before a run than after it."""
    if find_spec("nbconvert") is None:
        raise HTMLError("HTML needs nbconvert, which is not installed: pip install 'cellgate[html]'.")


def export(notebook: NotebookNode, title: str) -> str:
    """The whole page; raises `HTMLError`."""
    require()
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    make: Any = HTMLExporter  # nbconvert has no types
    exporter = make(
        extra_loaders=[DictLoader({"selfcontained.html.j2": TEMPLATE})],
        template_file="selfcontained.html.j2",
        embed_images=True,
    )
    try:
        page, _ = exporter.from_notebook_node(_printable(notebook), {"metadata": {"name": title}})
    except Exception as error:  # outputs come from cells: nbconvert meets them with whatever its filters trip over
        line = str(error).strip().partition("\n")[0]
        raise HTMLError(f"nbconvert can't render this notebook: {type(error).__name__}: {line}") from error
    return str(page)


def _printable(notebook: NotebookNode) -> NotebookNode:
    """A copy whose outputs hold only what a page can show: settled text and JSON; a widget would need its kernel."""
    copied = deepcopy(notebook)
    for cell in copied.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = settled(output.text)
            if "data" in output:
                output.data = {mime: value for mime, value in output.data.items() if _is_shown(mime, value)}
    return copied


def _is_shown(mime: str, value: Any) -> bool:
    if mime.startswith("application/vnd.jupyter.widget"):
        return False
    return isinstance(value, str) or mime.endswith("json")
