"""The supervisor's reports to the caller of `up`."""

import json
import os
import time
from typing import Any


class ReadyPipe:
    """Sends JSON lines to the caller of `up`: progress, then ready or error."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w")
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        self._send({"progress": f"{time.monotonic() - self._begun:5.1f} s  {text}"})

    def say_ready(self, lab: dict[str, Any]) -> None:
        self._send({"ready": lab})
        self._file.close()

    def say_error(self, text: str) -> bool:
        """Send the error. Returns whether the caller was still waiting."""
        waited = not self._file.closed
        self._send({"error": text})
        return waited

    def _send(self, document: dict[str, Any]) -> None:
        try:
            if not self._file.closed:
                self._file.write(json.dumps(document) + "\n")
                self._file.flush()
        except BrokenPipeError:
            pass  # The caller no longer waits. The lab continues.
