"""The live timeline: one line for each event, with the seconds since the start."""

import sys
import time
from typing import TextIO


class Timeline:
    """Shows the seconds since its creation, and after `fault` also those since the fault."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._started = time.monotonic()
        self._fault: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def heading(self, text: str) -> None:
        self._fault = None
        self._write(f"\n{text}\n{'-' * len(text)}")

    def say(self, what: str, detail: str = "") -> None:
        since = "" if self._fault is None else f"+{time.monotonic() - self._fault:5.1f} s"
        self._write(f"{self.seconds:6.1f} s  {since:>9}  {what:<16} {detail}".rstrip())

    def fault(self, detail: str) -> None:
        """From now until the next heading, lines also show the seconds since the fault."""
        self._fault = time.monotonic()
        self.say("fault", detail)

    def _write(self, text: str) -> None:
        print(text, file=self._out, flush=True)
