"""Checks of what a script passes to the API. Each error names call, argument, value and fix."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everstep.errors import Misuse
from everstep_contract.names import find_pin_problem

TEXT_LIMIT = 200


def whole(what: str, value: Any, least: int | None = None) -> int:
    """Accept a whole number of any integer type, numpy's too. Raises `Misuse`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise Misuse(f"{what}={value!r}: give a whole number{bound}")
    return number


def number(what: str, value: Any, means: str) -> float:
    """Accept a finite number that is not below 0. Raises `Misuse`, in
    which `means` names the number.
    """
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


def flag(what: str, value: Any) -> bool:
    """Accept a bool, numpy's too. Raises `Misuse`."""
    if not isinstance(value, (bool, np.bool_)):
        raise Misuse(f"{what}={value!r}: give True or False")
    return bool(value)


def text_or_none(what: str, value: Any) -> str | None:
    """Accept None, or a text of 1 to `TEXT_LIMIT` characters. Raises `Misuse`."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_LIMIT:
        raise Misuse(f"{what}={value!r:.80}: give a text of 1 to {TEXT_LIMIT} characters")
    return value


def pin_or_none(what: str, value: Any) -> str | None:
    """Accept None, or the name of a pinned checkpoint. Raises `Misuse`."""
    if value is not None and (problem := find_pin_problem(value)):
        raise Misuse(f"{what}: {problem}")
    return value  # type: ignore[no-any-return]


def choice(what: str, value: Any, choices: Sequence[str]) -> str:
    """Raises `Misuse`."""
    if value not in choices:
        expected = " or ".join(repr(c) for c in choices)
        raise Misuse(f"{what}={value!r}: give {expected}")
    return str(value)
