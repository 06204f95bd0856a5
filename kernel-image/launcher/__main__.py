"""`python -m cellgate_kernel -f CONNECTION_FILE`: thread pools read their size at import, hence the order below."""

import traceback

from . import plotly
from .surroundings import prepare

if __name__ == "__main__":
    prepare()
    plotly.install()

    from .app import KernelApp, last_words, settings

    try:
        KernelApp.launch_instance(config=settings())
    except Exception:
        last_words(traceback.format_exc())
        raise
