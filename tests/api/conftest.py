"""A gateway with small limits, so that each can be met; and one kernel in it."""

from collections.abc import Iterator

import pytest

from tests.support import Gateway, Kernel, running

ORIGIN = "https://lab.example"
HOST = "gateway.example"
MAX_KERNELS = 3
MAX_QUEUE = 2
MAX_CODE = 10_000
MAX_BODY = 200_000
MAX_UPLOAD = 1_000_000


@pytest.fixture(scope="package")
def strict() -> Iterator[Gateway]:
    server = {"allowed_origins": (ORIGIN,), "allowed_hosts": (HOST,), "max_body": MAX_BODY, "max_upload": MAX_UPLOAD}
    with running(server=server, kernels={"max_kernels": MAX_KERNELS, "max_queue": MAX_QUEUE, "max_code": MAX_CODE}) as gateway:
        yield gateway


@pytest.fixture(scope="package")
def kernel(strict: Gateway) -> Iterator[Kernel]:
    with strict.kernel() as started:
        yield started
