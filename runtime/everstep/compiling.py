"""Detects when torch's compiler works: the limits that a rank has learnt from its steps do not apply then."""

import sys
from collections.abc import Callable
from typing import Any

_COMPILER = "torch._dynamo"


class CompilerWatch:
    """Calls `compiles(True)` when torch's compiler begins, and `compiles(False)` when it has ended.
    The compiler may also run in one of torch's threads, while the main thread waits for it.
    """

    def __init__(self, compiles: Callable[[bool], None]) -> None:
        self._compiles = compiles

    def attach(self) -> None:
        """Register the callbacks if the script has loaded the compiler. Called at each step,
        because `torch._dynamo.reset` removes them.
        """
        compiler = sys.modules.get(_COMPILER)
        handler: Any = getattr(compiler, "callback_handler", None)
        if handler is None or self._begins in handler.start_callbacks:
            return
        handler.register_start_callback(self._begins)
        handler.register_end_callback(self._ends)

    def _begins(self, _: Any) -> None:
        self._compiles(True)

    def _ends(self, _: Any) -> None:
        self._compiles(False)
