"""Cellgate: stateful Jupyter kernels in locked-down sandboxes, reached over HTTP and WebSocket.

The rooms, in the direction in which they may know each other (checked by import-linter):
``cli -> app -> api -> kernels -> sandboxes -> protocol -> settings, errors, telemetry``.
``supervisor`` runs inside the sandbox and knows nobody.
"""

__version__ = "0.1.0"
