"""Which replica acts: one Lease (coordination.k8s.io/v1), used as in client-go. Pure.

No process compares another host's clock with its own: a candidate counts from the time at which
*it* saw the record change. The holder stops `renew` seconds after it requested its last renewal.
A candidate takes over no sooner than the lease's full duration after it saw that renewal. That is
later, so no replica acts in between.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

DEFAULT_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, as in client-go: `lease` > `renew` > `retry`."""

    lease: float = DEFAULT_SECONDS
    """How long candidates wait for a renewal: the Lease has whole seconds, at least 1, so rounded up."""
    renew: float = 10.0
    """The holder stops acting this long after its last renewal."""
    retry: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    holder: str
    """Empty: released."""
    seconds: float
    """How long a candidate must wait, as set by the holder."""
    acquired: str
    renewed: str
    """The holder's clock: compared only for equality."""
    transitions: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A Lease as read, and since when (by our own monotonic clock) it has been unchanged."""

    lease: Lease | None
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    holder: str
    seconds: float
    """Until the Lease may be taken if it is not renewed."""


Decision = Take | Renew | Wait


def to_lease(obj: Mapping[str, Any]) -> Lease:
    spec = obj.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        seconds=float(spec.get("leaseDurationSeconds") or DEFAULT_SECONDS),
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(obj["metadata"].get("resourceVersion", "")),
    )


def build_sighting(before: Sighting | None, found: Lease | None, now: float) -> Sighting:
    if before is not None and before.lease == found:
        return before
    return Sighting(lease=found, since=now)


def decide_lease(sighting: Sighting, me: str, now: float) -> Decision:
    lease = sighting.lease
    if lease is None:
        return Take(reason="there was none")
    if lease.holder == me:
        return Renew()
    if not lease.holder:
        return Take(reason="it was released")
    left = sighting.since + lease.seconds - now
    if left > 0:
        return Wait(holder=lease.holder, seconds=left)
    return Take(reason=f"{lease.holder} did not renew it for {lease.seconds:.0f} s")


def build_held(
    name: str, namespace: str, old: Lease | None, me: str, seconds: float, now: float
) -> dict[str, Any]:
    """The Lease, held by `me` from now on (`now`: seconds since the Unix epoch, for readers)."""
    stamp = to_micro_time(now)
    ours = old is not None and old.holder == me
    taken = 0 if old is None else old.transitions + (not ours)
    acquired = old.acquired if old is not None and ours else stamp
    return _build(name, namespace, old, me, seconds, acquired, stamp, taken)


def build_released(name: str, namespace: str, held: Lease, now: float) -> dict[str, Any]:
    """The Lease, released: it may be taken at once."""
    stamp = to_micro_time(now)
    return _build(name, namespace, held, "", 1, held.acquired, stamp, held.transitions)


def _build(
    name: str,
    namespace: str,
    old: Lease | None,
    holder: str,
    seconds: float,
    acquired: str,
    renewed: str,
    transitions: int,
) -> dict[str, Any]:
    """The version that was read is the precondition of the write."""
    version = {"resourceVersion": old.version} if old is not None else {}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace, **version},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(seconds)),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": transitions,
        },
    }


def to_micro_time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
