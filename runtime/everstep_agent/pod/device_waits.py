"""The wait between a worker's death from a device fault and the start of the slot's next worker.
Pure; times are time.monotonic().

The verdict on a broken GPU needs a scrape, which takes longer than a restart. A worker that started
at once would use the same GPU again. So the next worker waits until the operator has judged a
scrape made after the death. If the GPU is broken, the operator has by then asked the slot to leave
the node. On a node whose GPUs are not watched, no worker waits.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from everstep_contract import levels

JUDGMENT_SECONDS = 45.0
"""Limit of this wait. After it the worker starts without a judgment, because an operator or
exporter that does not answer must not keep a slot empty.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWait:
    id: str
    """`DeviceDeath.id`."""
    local: int
    message: str
    since: float


Waits = tuple[DeviceWait, ...]


def begin(waits: Waits, new: DeviceWait, wanted: levels.Wanted, slot: int) -> Waits:
    watched = slot in wanted.watched and all(w.id != new.id for w in waits)
    return (*waits, new) if watched else waits


def list_open(waits: Waits, wanted: levels.Wanted, slot: int, now: float) -> Waits:
    """The waits that have no judgment yet, are within the limit, and are on a node that is still
    watched.
    """
    if slot not in wanted.watched:
        return ()
    return tuple(w for w in waits if w.id not in wanted.judged and now - w.since < JUDGMENT_SECONDS)


def why_closed(wait: DeviceWait, wanted: levels.Wanted, slot: int) -> str:
    """The text of the log line when a wait ends."""
    if slot not in wanted.watched:
        return "the operator no longer watches this node's GPUs"
    if wait.id in wanted.judged:
        return "the operator has judged a later scrape of this node"
    return f"no judgment within {JUDGMENT_SECONDS:.0f} s"


def held_locals(waits: Iterable[DeviceWait]) -> Collection[int]:
    return {w.local for w in waits}


def to_levels(
    waits: Iterable[DeviceWait], slot: int, attempt: int, now: float
) -> tuple[levels.DeviceDeath, ...]:
    return tuple(
        levels.DeviceDeath(
            id=w.id,
            slot=slot,
            attempt=attempt,
            message=w.message,
            age_ms=round((now - w.since) * 1000),
        )
        for w in waits
    )
