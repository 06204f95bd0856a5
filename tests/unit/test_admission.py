"""Admission under parallel requests: the limits are exact, and 429 (the caller has enough) is told from 503 (the machine has)."""

from collections import Counter
from pathlib import Path

import anyio
import httpx2
import pytest

from gateway.app import create_app
from gateway.settings import MIB, Settings, load
from gateway.testing import FakeEngine

REQUESTS = 200


async def create_many(settings: Settings, engine: FakeEngine, count: int) -> list[httpx2.Response]:
    """`count` creates at once, over HTTP in memory."""
    app = create_app(settings, engine)
    answers: list[httpx2.Response] = []
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def create() -> None:
                answers.append(await client.post("/v1/kernels", json={}))

            async with anyio.create_task_group() as tasks:
                for _ in range(count):
                    tasks.start_soon(create)
            listed = (await client.get("/v1/kernels")).json()["kernels"]
    assert len(listed) == sum(answer.status_code == 201 for answer in answers)
    return answers


@pytest.mark.parametrize("limit", [1, 20])
def test_never_more_and_never_fewer_kernels_than_the_limit(tmp_path: Path, limit: int) -> None:
    settings = load(state_dir=tmp_path, kernels={"max_kernels": limit})
    answers = anyio.run(create_many, settings, FakeEngine(), REQUESTS)
    assert Counter(answer.status_code for answer in answers) == {201: limit, 429: REQUESTS - limit}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "too_many_kernels"
    assert refused.json()["limit"] == limit
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize(("memory", "fits"), [(10 * 1024 * MIB - 1, 9), (10 * 1024 * MIB, 10), (10 * 1024 * MIB + 1, 10)])
def test_promised_memory_is_bounded_by_the_machine(tmp_path: Path, memory: int, fits: int) -> None:
    settings = load(state_dir=tmp_path, kernels={"max_kernels": 100, "memory_overcommit": 1.0})
    engine = FakeEngine()
    engine.memory = memory
    answers = anyio.run(create_many, settings, engine, 30)
    assert Counter(answer.status_code for answer in answers) == {201: fits, 503: 30 - fits}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.json()["code"] == "no_capacity"
    assert refused.json()["retryable"] is True
    assert int(refused.headers["retry-after"]) > 0
