"""How long a state has lasted, as observed by this process.

No other host's clock is used. A new process starts from zero: it measures only how long it has
waited itself. Entries that no longer apply are dropped at the next reading.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from everstep_contract.levels import Scope
from everstep_operator.jobs import conditions, gang, starts
from everstep_operator.jobs.observed import Observed, Place, Pod
from everstep_operator.values import NodeState

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class Clocks:
    """The clocks of one job. `now`: seconds of a clock that nobody sets."""

    _since: dict[str, dict[Any, float]] = field(default_factory=dict)

    def read(self, kind: str, present: Iterable[T], now: float) -> Mapping[T, float]:
        """Name → seconds since it was first among `present` and has been ever since."""
        before = self._since.get(kind, {})
        since = {name: before.get(name, now) for name in present}
        self._since[kind] = since
        return {name: max(0.0, now - began) for name, began in since.items()}

    def read_one(self, kind: str, present: bool, now: float) -> float:
        """The same for a state of the job; 0: it is not in this state."""
        return self.read(kind, ["job"] if present else [], now).get("job", 0.0)


def measure(clocks: Clocks, observed: Observed, now: float) -> Observed:
    """The observation, completed with how long its pods have waited and for what."""
    pods = observed.pods
    unplaced = [p.uid for p in pods if not p.node and p.scheduling]
    suspected = [p.uid for p in pods if _is_suspected(observed, p)]
    return replace(
        observed,
        starting_for=clocks.read("starting", _list_starting(clocks, observed, now), now),
        unplaced_for=clocks.read("unplaced", unplaced, now),
        deleting_for=clocks.read("deleting", [p.uid for p in pods if p.deleting], now),
        leaving_for=clocks.read("leaving", _list_leaving(observed), now),
        stopping_for=clocks.read_one("stopping", bool(observed.job.status.stopping_since), now),
        over_for=clocks.read_one("over", _is_over(observed), now),
        suspected_for=clocks.read("suspected", suspected, now),
        steps_for=clocks.read_one("steps", _takes_steps(observed), now),
        running_for=clocks.read_one("running", _trained(observed), now),
        short_for=clocks.read_one("short", gang.is_short(observed), now),
    )


def _list_leaving(observed: Observed) -> list[Place]:
    return [(r.slot, r.attempt) for r in observed.job.status.slots if r.leaving_since is not None]


def _is_over(observed: Observed) -> bool:
    return any(conditions.is_true(observed.job.status, end) for end in conditions.OVER)


def _trained(observed: Observed) -> bool:
    """According to the job's last report, however old: to miss an answer starts no new epoch."""
    return observed.seen is not None and observed.seen.running


def _takes_steps(observed: Observed) -> bool:
    """In an evaluation or a pause no step ends, so none is saved."""
    members = observed.seen.members if observed.seen is not None else ()
    apart = any(m.scope in (Scope.EVALUATE, Scope.PAUSE) for m in members)
    return observed.running and not apart


def _list_starting(clocks: Clocks, observed: Observed, now: float) -> list[str]:
    """UIDs of pods that have a node and are not up, or not for long enough to count as started."""
    spec = observed.job.spec
    steady = min(starts.STEADY_SECONDS, spec.recovery.startup_seconds) if spec else 0.0
    living = [p for p in observed.pods if p.node and not p.over and not p.deleting]
    up = clocks.read("up", [p.uid for p in living if starts.is_up(observed, p)], now)
    return [p.uid for p in living if up.get(p.uid, -1.0) < steady]


def _is_suspected(observed: Observed, pod: Pod) -> bool:
    verdict = observed.verdicts.get(pod.node)
    return verdict is not None and verdict.state is NodeState.SUSPECT
