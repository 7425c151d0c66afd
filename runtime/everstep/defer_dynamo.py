"""Start-up without importing torch's compiler.

The first optimizer of a process imports `torch._dynamo`, which takes about as long as torch itself
(measured: 5 s alone on two cores, 15 s and more when three workers start together), only to exclude
its methods from compilation. While the compiler is not loaded there is nothing to exclude them
from. Once the script loads it (`torch.compile`), torch's own wrappers are used again. If torch's
code is not as expected here, nothing is changed.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"


def defer_compiler() -> None:
    """Run optimizers without the compiler's wrappers until the script loads `torch._dynamo`."""
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if (
            plain is not None
            and _made_in(method, "torch/_compile.py")
            and not hasattr(plain, _MARK)
        ):
            setattr(plain, _MARK, _disable_later(plain))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if getattr(step, "__wrapped__", None) is not None and _made_in(step, "optim/optimizer.py"):
            kind.step = _wrap_later(step)


def _made_in(function: Any, file: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.endswith(file)


def _disable_later(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make what replaces the excluded function that torch keeps at `plain`."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        disabled = torch._dynamo.disable(plain, wrapping=False)  # type: ignore[no-untyped-call]
        setattr(plain, _MARK, disabled)
        return disabled(*args, **kwargs)

    return call


def _wrap_later(step: Any) -> Callable[..., Any]:
    """Make what replaces an optimizer's `step`, which torch wraps in graph breaks and a grad
    mode.
    """
    plain = step.__wrapped__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return call
