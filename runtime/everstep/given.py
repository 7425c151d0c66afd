"""What a script hands to the API, checked where it comes in: each refusal names call, argument, value and fix."""

import math
import operator
from collections.abc import Callable
from typing import Any

from everstep.errors import Misuse


def whole(what: str, value: Any, least: int | None = None) -> int:
    """Of any integer type, numpy's too. Raises `Misuse`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise Misuse(f"{what}={value!r}: give a whole number{bound}")
    return number


def number(what: str, value: Any, means: str) -> float:
    """Finite and not below 0. Raises `Misuse`; `means` ends its sentence."""
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise Misuse(f"{what}={value!r}: {means} is a finite number, not below 0")
    return found


def callable_or_none(what: str, value: Any) -> Callable[..., Any] | None:
    """Raises `Misuse`."""
    if value is not None and not callable(value):
        raise Misuse(f"{what}={value!r}: give a function, without calling it")
    return value  # type: ignore[no-any-return]
