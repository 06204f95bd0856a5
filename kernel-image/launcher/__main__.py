"""`python -m cellgate_kernel -f CONNECTION_FILE`: thread pools read their size at import, hence the order below."""

from . import plotly
from .surroundings import prepare

if __name__ == "__main__":
    prepare()
    plotly.install()

    from .app import KernelApp, settings

    KernelApp.launch_instance(config=settings())
