"""What a log never says: a token, code, outputs, answers, values of variables, the words of a wrong request.

A gateway of its own process, at its most talkative, goes through all that a client can do, well and badly; then every byte
that it wrote is searched.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support import running

SERVE = """
import sys
from gateway.app import serve
from gateway.settings import load
settings = load(state_dir=sys.argv[1], token=sys.argv[2], log_level="debug", log_format=sys.argv[3], server={"port": 0})
serve(settings, lambda url: print(url, flush=True))
"""
KINDS = [
    "token",
    "wrongtoken",
    "querytoken",
    "code",
    "output",
    "error",
    "envvalue",
    "answer",
    "label",
    "content",
    "body",
    "frame",
    "crash",
]
WORDS = {kind: f"{kind}-5f2c9a" for kind in KINDS}


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_secret_and_no_word_of_a_client_is_logged(form: str) -> None:
    with tempfile.TemporaryDirectory(prefix="cg-", dir="/tmp") as state, tempfile.TemporaryFile() as log:
        token = f"{WORDS['token']}-long-enough"
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, state, token, form], stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            behave_well_and_badly(url, token)
        finally:
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)
        log.seek(0)
        text = log.read().decode() + rest
    assert text.count("kernel_started") == 1
    assert "request" in text
    assert [kind for kind, word in WORDS.items() if word in text] == []
    if form == "json":
        lines = [json.loads(line) for line in text.splitlines()]
        assert all({"event", "level", "timestamp"} <= set(line) for line in lines)


def behave_well_and_badly(url: str, token: str) -> None:
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        http.get("/v1/kernels", headers={"Authorization": f"Bearer {WORDS['wrongtoken']}"})
        http.get("/v1/kernels", params={"token": WORDS["querytoken"]})
        created = http.post("/v1/kernels", json={"env": {"SECRET": WORDS["envvalue"]}, "label": WORDS["label"]})
        assert created.status_code == 201
        path = f"/v1/kernels/{created.json()['id']}"
        run = f"{path}/execute"
        half = WORDS["output"][:4]
        code = f"# {WORDS['code']}\nimport os\nprint('{half}' + '{WORDS['output'][4:]}', os.environ['SECRET'])"
        assert WORDS["output"] in http.post(run, json={"code": code}).text
        assert http.post(run, json={"code": f"raise ValueError('{WORDS['error']}')"}).json()["status"] == "error"
        http.post(run, json={"code": 1, "body": WORDS["body"]})
        http.post(run, content=WORDS["body"].encode(), headers={"Content-Type": "application/json"})
        http.post(run, content=WORDS["body"].encode(), headers={"Content-Type": f"text/{WORDS['body']}"})
        http.put(f"{path}/files/file", content=WORDS["content"].encode())
        assert http.get(f"{path}/files/file").text == WORDS["content"]
        ask(url.replace("http", "ws") + path + "/ws", token)
        crash = f"import sys, os\nos.write(2, b'{WORDS['crash']}')\nprint('{WORDS['crash']}', file=sys.__stderr__)\nos._exit(3)"
        assert http.post(run, json={"code": crash}).json()["status"] == "died"
        http.post(f"{path}/restart")
        http.delete(path)


def ask(url: str, token: str) -> None:
    with connect(url, additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        socket.send(WORDS["frame"])
        socket.send(json.dumps({"op": WORDS["frame"]}))
        socket.send(json.dumps({"op": "execute", "code": "print(input())", "request_id": "a"}))
        while (event := json.loads(socket.recv(timeout=60)))["type"] != "ended":
            if event["type"] == "input_request":
                socket.send(json.dumps({"op": "input", "execution_id": event["execution_id"], "value": WORDS["answer"]}))
    with pytest.raises(InvalidStatus):
        connect(f"{url}?token={WORDS['querytoken']}")


def test_the_token_file_is_for_its_owner_alone() -> None:
    with running() as gateway:
        path = Path(gateway.settings.state_dir, "token")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_uid == os.geteuid()
        assert len(path.read_text().strip()) >= 32
