"""Feeds wrong bytes to everything that reads from a sandbox, and says what came of it.

Two readers are tried: the frames of the link (`Decoder` and what unpacks its frames) and the Jupyter messages inside them (`split`,
`decode_json`, `to_payload`). Inputs are good ones with some changes, since pure noise gets no further than the first check. The only
ways out are a value that can be said again as JSON, `FrameError` and `BadMessage`; anything else ends the run with the input shown.

    scripts/fuzz-link [--inputs N] [--seed N]
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

from gateway.protocol.events import Event, Payload, coalesce
from gateway.protocol.messages import DELIMITER, BadMessage, RawMessage, split
from gateway.protocol.outputs import OutputCollector, to_payload
from gateway.sandboxes.link import unpack_object
from gateway.supervisor import frames
from gateway.supervisor.frames import Decoder, Frame, FrameError, Kind

MAX_FRAME = 1 << 16
MAX_PARTS = 64
TOKENS = (
    *(b"NaN", b"-Infinity", b"1e999", b"-1e400", b"9" * 25, b"-" + b"9" * 400, b"0.1e-999", b"true", b"null", b"-0"),
    *(b"\\ud800", b"\\udfff\\ud800", b"\\ud83d\\ude00", b"\\u0000", b"\xed\xa0\x80", b"\xff\xfe", b"\xf0\x9f\x98\x80"),
    *(b"[", b"]", b"{", b"}", b'"', b":", b",", b"\\", b"{}", b"[]", b'""', b"[" * 300, b'{"a":' * 260, b"\x00", b"\n"),
    *(b"<IDS|MSG>", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x00\x01\x00\x00", b"\x03", b"\x0d"),
)
MESSAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stream", {"name": "stdout", "text": "some text\n"}),
    ("display_data", {"data": {"text/plain": "x", "image/png": "iVBO"}, "metadata": {}, "transient": {"display_id": "d"}}),
    ("update_display_data", {"data": {"text/html": "<b>"}, "metadata": {}, "transient": {"display_id": "d"}}),
    ("execute_result", {"data": {"application/json": [1, 2.5, None, {"a": "é"}]}, "metadata": {}, "execution_count": 3}),
    ("error", {"ename": "E", "evalue": "v", "traceback": ["\x1b[31mline", "line"]}),
    ("clear_output", {"wait": True}),
    ("input_request", {"prompt": "? ", "password": False}),
    ("status", {"execution_state": "idle"}),
    ("execute_input", {"code": "1", "execution_count": 1}),
    ("execute_reply", {"status": "error", "ename": "E", "evalue": "v", "traceback": []}),
)


class Fuzzer:
    """Makes inputs from a seed, tries them, and counts what became of each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._streams = [self._stream() for _ in range(100)]
        self._messages = [parts(*message) for message in MESSAGES]
        self._collector = OutputCollector()

    def run(self, inputs: int) -> None:
        """Tries so many inputs. What a reader raises besides its own errors goes up with a note of the input."""
        for number in range(inputs):
            attempt: Callable[[Any], None]
            data: Any
            if number % 2:
                attempt, data = self._try_stream, self.mutate(self.random.choice(self._streams))
            else:
                attempt, data = self._try_message, self._mutated_message()
            try:
                attempt(data)
            except Exception as error:
                error.add_note(f"input {number}: {data!r}")
                raise
        self.counts["inputs"] += inputs

    # inputs

    def _stream(self) -> bytes:
        """Some good frames, of all kinds, one after the other."""
        packed = []
        for seq in range(1, self.random.randint(2, 6)):
            kind = self.random.choice(list(Kind))
            if kind is Kind.MESSAGE:
                packed.append(frames.pack_message(self.random.randint(1, 4), parts(*self.random.choice(MESSAGES)), seq))
            elif kind in (Kind.DATA, Kind.DATA_END, Kind.CREDIT):
                packed += [frames.pack_data(3, b"data"), frames.pack_credit(3, 5), frames.pack_data_end(3, {"error": None})]
            else:
                value = {"event": "kernel_exit", "id": 1, "version": 1, "secret": "", "result": {"a": [1, "é"]}}
                packed.append(frames.pack_json(kind, value, seq))
        return b"".join(packed)

    def _mutated_message(self) -> list[bytes]:
        wire = list(self.random.choice(self._messages))
        for _ in range(self.random.randint(0, 2)):
            position = self.random.randrange(len(wire))
            choice = self.random.random()
            if choice < 0.8:
                wire[position] = self.mutate(wire[position])
            elif choice < 0.9:
                del wire[position]
            else:
                wire.insert(position, self.random.choice(TOKENS))
            if not wire:
                break
        return wire

    def mutate(self, good: bytes) -> bytes:
        """Up to four small changes: bytes changed, cut out, doubled, or replaced by something known to be nasty."""
        data, chance = bytearray(good), self.random
        for _ in range(chance.randint(0, 4)):
            start = chance.randrange(len(data) + 1)
            end = min(len(data), start + chance.choice((0, 1, 1, 2, 4, 30)))
            choice = chance.random()
            if choice < 0.35:
                data[start:end] = chance.choice(TOKENS)
            elif choice < 0.6:
                data[start:end] = chance.randbytes(end - start)
            elif choice < 0.75:
                del data[start:end]
            elif choice < 0.9:
                data[start:start] = data[start:end]
            else:
                del data[start:]
        return bytes(data)

    # readers

    def _try_stream(self, data: bytes) -> None:
        decoder = Decoder(MAX_FRAME)
        position, found = 0, 0
        try:
            while position < len(data):
                size = self.random.choice((1, 7, 40, len(data)))
                for frame in decoder.feed(data[position : position + size]):
                    found += 1
                    self._unpack(frame)
                position += size
                assert decoder.buffered <= MAX_FRAME + frames.HEADER.size
        except FrameError:
            self.counts["streams refused"] += 1
        else:
            self.counts["streams read"] += 1
        self.counts["frames"] += found
        assert found * frames.HEADER.size <= len(data)

    def _unpack(self, frame: Frame) -> None:
        """As the link and the kernel's client do."""
        if frame.kind is Kind.MESSAGE:
            self._read(*frames.unpack_message(frame.payload, MAX_PARTS))
        elif frame.kind in (Kind.DATA, Kind.DATA_END):
            _, rest = frames.unpack_data(frame.payload)
            if frame.kind is Kind.DATA_END:
                say_again(unpack_object(rest))
        elif frame.kind is Kind.CREDIT:
            frames.unpack_credit(frame.payload)
        elif frame.kind not in (Kind.ACK, Kind.PING, Kind.PONG):
            say_again(unpack_object(frame.payload))

    def _read(self, channel: frames.Channel, wire: list[bytes]) -> None:
        try:
            self._show(split(channel.name.lower(), wire))
        except BadMessage:
            self.counts["messages refused"] += 1
        else:
            self.counts["messages read"] += 1

    def _try_message(self, wire: list[bytes]) -> None:
        self._read(frames.Channel.IOPUB, wire)

    def _show(self, message: RawMessage) -> None:
        """To the end of the way: an event as JSON, and the outputs of a cell."""
        say_again([message.header, message.parent, message.msg_type, message.parent_id])
        content = message.content()
        say_again(content)
        payload = to_payload(message.msg_type, content)
        if payload is None:
            return
        self.counts[payload.type] += 1
        (kept,) = coalesce([payload])
        assert Event(1, kept.type, "", "e", kept.members).json
        self._collect(payload)

    def _collect(self, payload: Payload) -> None:
        if len(self._collector.outputs) > 50:
            self._collector = OutputCollector()
        self._collector.add_members(payload.type, payload.members)
        say_again(self._collector.finish()[-3:])


def parts(msg_type: str, content: dict[str, Any]) -> list[bytes]:
    """The parts of a good message, with a buffer."""
    header = {"msg_id": "m", "msg_type": msg_type, "session": "s", "username": "k", "date": "2026-11-30", "version": "5.4"}
    encoded = [json.dumps(value).encode() for value in (header, {"msg_id": "p"}, {}, content)]
    return [b"topic", DELIMITER, b"signature", *encoded, b"buffer"]


def say_again(value: Any) -> None:
    """Raises TypeError for what no client could be told."""
    orjson.dumps({"a": [value]})


def peak_memory() -> int:
    """MiB of this process at its largest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz-link", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: another one each time"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    fuzzer, before, begun = Fuzzer(arguments.seed), peak_memory(), time.monotonic()
    fuzzer.run(arguments.inputs)
    for name, count in sorted(fuzzer.counts.items()):
        print(f"{name:20} {count:>12,}")
    print(f"{time.monotonic() - begun:.1f} s, peak memory {peak_memory()} MiB ({peak_memory() - before} MiB more than before)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
