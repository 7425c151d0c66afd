"""Which nodes are silent: those whose lease is not renewed while the leases of others are. Pure.

Each kubelet renews its node's lease (namespace `kube-node-lease`) four times within the lease's
duration. The times in a lease are another host's, so they are compared only for equality; how long
a lease has been unchanged is measured by this process's clock.

If no lease is renewed, the fault is the API server's, and no node is silent. Such time does not
count as silence of any node, nor does time in which the leases could not be listed: a renewal may
not have been possible.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GAP_SECONDS = 10.0
"""If two lists are further apart than this, the leases were unobserved in between."""
DEFAULT_LEASE_SECONDS = 40.0
"""The kubelet's default, used if a lease names no duration."""
OVERDUE = 3 / 8
"""Share of a lease's duration: 1.5 times the kubelet's interval between two renewals."""
LEAST_OVERDUE_SECONDS = 8.0
"""More than twice the interval between two lists: a renewal is seen only in the next list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unchanged:
    """A lease, and since when it has not been renewed."""

    renewed: str
    since: float
    overdue_after: float


@dataclass(slots=True)
class Silence:
    """`now`, in all methods: seconds of one monotonic clock."""

    _leases: dict[str, _Unchanged] = field(default_factory=dict)
    _silent: dict[str, float] = field(default_factory=dict)
    """Node → since when its lease has not been renewed; only silent nodes."""
    _noted_at: float = -math.inf

    def note(self, leases: Iterable[Mapping[str, Any]], now: float) -> None:
        """Record a list of all node leases, just read from the API server."""
        specs = {lease["metadata"]["name"]: lease.get("spec") or {} for lease in leases}
        held = {n: u for n, u in self._leases.items() if n in specs}
        self._noted_at, passed = now, now - self._noted_at
        if passed > GAP_SECONDS:
            held = _postpone(held, passed)
        renewed = {
            n for n, spec in specs.items() if n not in held or _time(spec) != held[n].renewed
        }
        if renewed & held.keys():
            held = _postpone(held, _measure_standstill(held, now))
        self._leases = held | {n: _start(specs[n], now) for n in renewed}
        self._silent = _find_silent(self._leases, now)

    def list_silent(self, now: float) -> dict[str, float]:
        """Node → seconds of its silence; empty while the leases cannot be listed."""
        if now - self._noted_at > GAP_SECONDS:
            return {}
        return {node: now - since for node, since in self._silent.items()}


def _time(spec: Mapping[str, Any]) -> str:
    return str(spec.get("renewTime") or "")


def _start(spec: Mapping[str, Any], now: float) -> _Unchanged:
    duration = float(spec.get("leaseDurationSeconds") or DEFAULT_LEASE_SECONDS)
    overdue = max(LEAST_OVERDUE_SECONDS, duration * OVERDUE)
    return _Unchanged(renewed=_time(spec), since=now, overdue_after=overdue)


def _postpone(leases: Mapping[str, _Unchanged], seconds: float) -> dict[str, _Unchanged]:
    return {n: replace(u, since=u.since + seconds) for n, u in leases.items()}


def _find_newest(leases: Mapping[str, _Unchanged]) -> _Unchanged:
    return max(leases.values(), key=lambda u: u.since)


def _measure_standstill(leases: Mapping[str, _Unchanged], now: float) -> float:
    """Seconds since the newest renewal of any lease, if the next one is overdue; else 0."""
    newest = _find_newest(leases)
    quiet = now - newest.since
    return quiet if quiet > newest.overdue_after else 0.0


def _find_silent(leases: Mapping[str, _Unchanged], now: float) -> dict[str, float]:
    """Node → since when its lease has not been renewed, for nodes whose renewal was overdue when
    the newest renewal of another node came.
    """
    if not leases or _measure_standstill(leases, now):
        return {}
    newest = _find_newest(leases).since
    return {n: u.since for n, u in leases.items() if newest - u.since > u.overdue_after}
