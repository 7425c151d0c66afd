"""When a worker counts as hung. Pure.

A rank that does not wait for others hangs if it exceeds the limit of its scope. A rank that waits
for others is not the cause, as long as its group exists. After a cut no rank has a reason to wait:
one that does not park within `PARK_SECONDS` hangs, too. Time in which the whole pod stood still
does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract.position import Phase, Position, Where

PARK_SECONDS = 20.0
"""Limit for a rank to leave a collective whose sockets were closed."""
STOPPED_SECONDS = 2.0
"""A longer time between two looks counts as this much: the agent itself stood still, and its workers
probably with it (a frozen container, a paused virtual machine).
"""
STOPS = 16
"""How many of the newest stops are remembered."""
STEP_SETTING = "recovery.hangSeconds, --hang-seconds"
"""The names of the setting `Limits.step`, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    step: float
    startup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    scope: str
    seconds: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The agent stood still until `at`, for so many seconds."""

    at: float
    seconds: float


def note_stop(stops: Sequence[Stop], former: float, now: float) -> tuple[Stop, ...]:
    """`former`: the time of the look before the one at `now`."""
    stopped = now - former - STOPPED_SECONDS
    return (*stops, Stop(at=now, seconds=stopped))[-STOPS:] if stopped > 0 else tuple(stops)


def count_seconds(since: float, now: float, stops: Sequence[Stop]) -> float:
    """The seconds since then, without those of stops."""
    return now - since - sum(min(s.seconds, s.at - since) for s in stops if s.at > since)


def classify_hang(
    position: Position,
    *,
    started: float,
    cut: float | None,
    limits: Limits,
    now: float,
    stops: Sequence[Stop] = (),
) -> Hang | None:
    """`started`: when the worker received Start; `cut`: when it received Cut. Times are
    time.monotonic().
    """
    since, what = max(position.since, started), _describe(position)
    limit, setting = _choose_limit(position, limits)
    named = f" ({setting})"
    if position.waiting:
        if cut is None:
            return None
        since, limit, named = cut, min(limit, PARK_SECONDS), ""
        what = f"a collective of {what}, after its group was cut,"
    spent = count_seconds(since, now, stops)
    if limit <= 0 or spent <= limit:
        return None
    return Hang(
        scope=position.scope.name.lower(),
        seconds=spent,
        message=f"hung: {spent:.0f} s in {what}; the limit is {limit:.0f} s{named}",
    )


def describe_long_wait(
    position: Position,
    *,
    started: float,
    limits: Limits,
    now: float,
    stops: Sequence[Stop] = (),
) -> str | None:
    """What to log about a rank that has waited for others longer than a rank may compute; None: it
    has not.
    """
    spent = count_seconds(max(position.since, started), now, stops)
    if not position.waiting or not 0 < _choose_limit(position, limits)[0] < spent:
        return None
    return f"waits for other ranks: {spent:.0f} s in {_describe(position)}; its stacks follow"


def _describe(position: Position) -> str:
    """The step or other scope that a rank is in."""
    if position.scope is Where.STEP:
        return name_step(position)
    return position.scope.name.lower()


def name_step(position: Position) -> str:
    """The step that a rank is in. One that is applied is not over before its boundary, where saves are made."""
    if position.phase is Phase.APPLIED and position.applied:
        return f"step {position.applied}, after it was applied"
    return f"step {position.applied + 1}"


def _choose_limit(position: Position, limits: Limits) -> tuple[float, str]:
    """The limit of a scope in seconds, and the setting that holds it."""
    if position.limit_ms > 0:
        return position.limit_ms / 1000, "job.pause(limit=…)"
    if position.scope is Where.STARTUP:
        return limits.startup, "recovery.startupSeconds, --startup-seconds"
    return limits.step, STEP_SETTING
