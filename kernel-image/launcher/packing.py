"""Packs messages so that no text is lost for being no Unicode: a lone surrogate travels as its JSON escape.

jupyter_client's packer raises UnicodeEncodeError on one, in the thread that sends outputs, and the output is gone.
"""

import json
from typing import Any

from jupyter_client.jsonutil import json_default
from jupyter_client.session import json_packer


def pack(value: Any) -> bytes:
    """JSON, in UTF-8 where that is possible and else in ASCII."""
    try:
        return json_packer(value)
    except UnicodeEncodeError:
        return json.dumps(value, default=json_default, allow_nan=False).encode()
