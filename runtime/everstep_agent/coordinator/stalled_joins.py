"""Pods that could not take over the state of the running ranks: how often, and when they are invited again. Pure;
times are those of the coordinator's clock, in seconds.

Each try holds the members at a boundary, for `transfer_rules.STILL_SECONDS` if nothing arrives, and drops the saves
that are not committed. So a pod with a bad link would slow the run for as long as it lives. The pauses between its
tries grow. Meanwhile another pod may join, and if all ranks restart, the pod may start with them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from everstep_agent.peers.epoch_level import EpochMember, Id

PAUSE_SECONDS = (0.0, 30.0, 120.0, 600.0)
"""Before a pod is invited again, by its number of failed joins in a row. A single failure may be another's fault."""

Pod = tuple[int, int]
"""(slot, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedJoins:
    """Of one pod."""

    count: int
    """How many in a row."""
    why: str
    """Why the last one failed."""
    pause: float
    """Seconds from the last one until the pod is invited again."""
    until: float
    """When this pause ends."""


def note(
    known: Mapping[Pod, FailedJoins], failed: Mapping[Id, str], now: float
) -> dict[Pod, FailedJoins]:
    """Count a failed join of each of these newcomers, which have failed for these reasons. What is known of former
    attempts of their slots is dropped.
    """
    slots = {slot for slot, _, _ in failed}
    found = {pod: joins for pod, joins in known.items() if pod[0] not in slots}
    for (slot, attempt, _), why in failed.items():
        former = known.get((slot, attempt))
        count = former.count + 1 if former else 1
        pause = PAUSE_SECONDS[min(count, len(PAUSE_SECONDS)) - 1]
        found[slot, attempt] = FailedJoins(count=count, why=why, pause=pause, until=now + pause)
    return found


def forget_joined(
    known: Mapping[Pod, FailedJoins], members: Iterable[EpochMember]
) -> dict[Pod, FailedJoins]:
    """Forget the pods that have all their ranks in an epoch of these members."""
    whole = {m.id[:2] for m in members if all(m.lives)}
    return {pod: joins for pod, joins in known.items() if pod not in whole}


def count_most(known: Mapping[Pod, FailedJoins], newcomers: Iterable[EpochMember]) -> int:
    """The largest number of failed joins in a row of any of these newcomers."""
    return max((known[m.id[:2]].count for m in newcomers if m.id[:2] in known), default=0)


def list_waiting(known: Mapping[Pod, FailedJoins], now: float) -> frozenset[Pod]:
    """The pods that are not to be invited yet."""
    return frozenset(pod for pod, joins in known.items() if now < joins.until)


def describe(known: Mapping[Pod, FailedJoins], pods: Collection[Pod]) -> tuple[str, ...]:
    """For the status: a message (`levels.POD_NOTE`) about each of `pods` that has failed more than once."""
    return tuple(
        f"slot {slot}: its pod could not take over the state {joins.count} times in a row, the last time because "
        f"{joins.why}. The other ranks train on, and a spare may take its place. Everstep invites it again "
        f"{joins.pause:.0f} s after the last try. Check its log, its node, and the network between its node and the "
        "others"
        for (slot, attempt), joins in sorted(known.items(), key=lambda item: item[0])
        if joins.pause and (slot, attempt) in pods
    )
