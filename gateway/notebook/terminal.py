"""Text from a cell as a terminal would show it, made safe. Pure.

A terminal obeys what is printed: cell output could set the window title, fill the clipboard, move the cursor over what
the user trusts, or answer as if typed. Colours (SGR) are let through, every other control sequence is taken out.
"""

import re
from dataclasses import dataclass, field

_SGR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_CONTROL = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC: strings with an end
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI
    r"|\x1b[ -/]*[0-~]?"  # all other escapes
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # C0 and C1, without tab and newline
)

MAX_PENDING = 64 * 1024
"""Characters of an unfinished line that are kept; a longer one is broken there."""


def clean(text: str) -> str:
    """Text without control sequences, colours kept. Tabs and newlines stay."""
    return _CONTROL.sub(lambda found: found[0] if _SGR.fullmatch(found[0]) else "", text)


def settled(text: str) -> str:
    """`settle` for text of many lines."""
    return "\n".join(map(settle, text.split("\n")))


def settle(line: str) -> str:
    """What stands on a line once carriage returns and backspaces have done their work: a progress bar's last state."""
    line = _last_state(line)
    if "\b" in line:
        kept: list[str] = []
        for character in line:
            if character != "\b":
                kept.append(character)
            elif kept:
                kept.pop()
        line = "".join(kept)
    return clean(line)


def _last_state(line: str) -> str:
    """What was written after the last carriage return that was followed by anything."""
    return next((part for part in reversed(line.split("\r")) if part), "")


@dataclass(slots=True)
class LineBuffer:
    """Text in pieces -> whole lines, settled; `pending` is the unfinished last one."""

    _pieces: list[str] = field(default_factory=list)
    _length: int = 0

    def feed(self, text: str) -> list[str]:
        *lines, rest = text.split("\n")
        done: list[str] = []
        for line in lines:
            done.append(settle("".join([*self._pieces, line])))
            self._drop()
        self._pieces.append(rest)
        self._length += len(rest)
        if self._length > MAX_PENDING:
            self._shrink()
        if self._length > MAX_PENDING:
            done += self.flush()
        return done

    def flush(self) -> list[str]:
        """The unfinished line, if there is one, and a fresh start."""
        line = settle("".join(self._pieces))
        self._drop()
        return [line] if line else []

    @property
    def pending(self) -> str:
        return settle("".join(self._pieces))

    def _shrink(self) -> None:
        """Forget the earlier states of a progress bar. A return at the very end still waits for what will overwrite."""
        line = "".join(self._pieces)
        self._pieces = [_last_state(line) + ("\r" if line.endswith("\r") else "")]
        self._length = len(self._pieces[0])

    def _drop(self) -> None:
        self._pieces.clear()
        self._length = 0
