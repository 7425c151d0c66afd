"""The cost of a call in executed bytecodes of a package, which does not depend on clock or machine."""

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any


class Meter:
    """Counts the executed bytecodes while its `with` block runs."""

    def __init__(self, package: str = "everstep_operator") -> None:
        self._part = f"/{package}/"
        self.done = 0

    def __enter__(self) -> "Meter":
        sys.settrace(self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._part not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.done += event == "opcode"
        return self._count


def count(act: Callable[[], object]) -> int:
    with Meter() as meter:
        act()
    return meter.done


async def count_async(act: Callable[[], Awaitable[object]]) -> int:
    with Meter() as meter:
        await act()
    return meter.done
