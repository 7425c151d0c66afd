"""How many restarts of each kind a job may have within a window. Pure.

Restarts are counted by the hour if the window is a day, otherwise in as many parts, so the record
does not grow with the age of the job. A part counts until its beginning is older than the window,
so a restart may stop counting up to one part early, but never late.
"""

from collections.abc import Mapping, Sequence

from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model import RestartBudgets
from everstep_operator.model_status import RecentRestarts, Restarts

BUDGETS: Mapping[str, frozenset[str]] = {
    "node": frozenset(
        {
            "NodeLeaving",
            "NodeGone",
            "NodeLost",
            "DeviceFailed",
            "NetworkFailed",
            "ProcessStuck",
            "ReplicasDiffer",
            "GroupBroken",
            "GroupStuck",
        }
    ),
    "pod": frozenset(
        {
            "PodDeleted",
            "PodEvicted",
            "PodFenced",
            "PodLeft",
            "PodNotStarted",
            "PodRefusedByNode",
            "ContainerEnded",
            "AgentLost",
            "CoordinatorLost",
            "CheckpointBroken",
            "SaveLost",
            "Gone",
            "Replaced",
        }
    ),
    "worker": frozenset({"WorkerDied", "WorkerCrashed", "UserError", "AgentError"}),
    "hang": frozenset({"WorkerHung"}),
}
"""Field of `recovery.restartBudgets` → causes that count against it."""
OTHERS = "worker"
"""The budget of a cause that this operator does not know because it comes from a newer runtime."""
PARTS = 24


def budget_of(cause: str) -> str:
    return next((name for name, causes in BUDGETS.items() if cause in causes), OTHERS)


def count_recent(
    restarts: Restarts | None, budget: str, window_seconds: float, now: float
) -> dict[str, int]:
    """Cause → restarts that count against this budget now."""
    found: dict[str, int] = {}
    for part in _within(restarts.recent if restarts else (), window_seconds, now):
        if budget_of(part.cause) == budget:
            found[part.cause] = found.get(part.cause, 0) + part.count
    return dict(sorted(found.items()))


def _within(
    parts: Sequence[RecentRestarts], window_seconds: float, now: float
) -> list[RecentRestarts]:
    return [p for p in parts if (to_seconds(p.since) or 0.0) > now - window_seconds]


def add_recent(
    parts: Sequence[RecentRestarts], cause: str, window_seconds: float, now: float
) -> list[RecentRestarts]:
    length = max(1.0, window_seconds // PARTS)
    since = to_stamp(now // length * length)
    kept = _within(parts, window_seconds, now)
    held = next((p for p in kept if (p.cause, p.since) == (cause, since)), None)
    if held is None:
        return [*kept, RecentRestarts(cause=cause, since=since, count=1)]
    return [p.model_copy(update={"count": p.count + 1}) if p is held else p for p in kept]


def remove_recent(parts: Sequence[RecentRestarts], cause: str) -> list[RecentRestarts]:
    """The same parts without the newest restart of this cause."""
    held = next((p for p in reversed(parts) if p.cause == cause), None)
    if held is None:
        return list(parts)
    lower = [held.model_copy(update={"count": held.count - 1})] if held.count > 1 else []
    return [new for p in parts for new in (lower if p is held else [p])]


def describe_overrun(restarts: Restarts | None, limits: RestartBudgets, now: float) -> str:
    """Which budget is exhausted, and by which causes; empty if none is."""
    for name in BUDGETS:
        found = count_recent(restarts, name, limits.window_seconds, now)
        allowed: int = getattr(limits, name)
        if sum(found.values()) > allowed:
            return (
                f"{sum(found.values())} interruptions of the kind `{name}` within "
                f"{_describe_window(limits.window_seconds)}, and recovery.restartBudgets.{name} allows "
                f"{allowed}: {', '.join(f'{cause} {n}' for cause, n in found.items())}. Remove the cause, or raise the "
                "budget; then create the job again: it resumes from its newest checkpoint"
            )
    return ""


def _describe_window(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds % 3600 == 0 else f"{seconds} s"


def is_node_cause(cause: str | None) -> bool:
    """Whether the cause is evidence against the slot's node."""
    return cause in BUDGETS["node"]
