"""The runtime's decisions about a round, a break and the save after it, cached by their arguments.

A search asks for each of them millions of times, but only some thousands of times with new
arguments.
"""

from functools import lru_cache

from everstep_agent.coordinator import breaks, postmortem, rounds
from simulation.protocol.world import Orders, Place, Snap, build_report, build_wanted, kept

GANG_SECONDS, STALE_SECONDS, PATIENCE_SECONDS, NEVER = 5.0, 5.0, 8.0, 1e9


@lru_cache(maxsize=1 << 16)
def decide_start(
    view: tuple[Snap, ...],
    orders: Orders,
    round_: int,
    waited: float,
    former: frozenset[Place],
) -> rounds.Start | None:
    reports = [build_report(s) for s in view]
    decision = rounds.decide_epoch(
        reports,
        build_wanted(*orders),
        round=round_,
        waited=waited,
        gang=GANG_SECONDS,
        former=former,
    )
    return decision if isinstance(decision, rounds.Start) else None


@lru_cache(maxsize=1 << 16)
def find_cause(level: int, view: tuple[Snap, ...], orders: Orders) -> str | None:
    """Why the running epoch has to end, as far as the reports show."""
    aged = [(build_report(s), 0.0) for s in view]
    found = breaks.find_break(kept(level), aged, build_wanted(*orders), idle=0.0, hang=NEVER)
    return found.cause if found is not None else None


@lru_cache(maxsize=1 << 16)
def decide_saver(
    level_kept: int,
    heard: tuple[tuple[Snap, bool], ...],
    gone: frozenset[Place],
    failed: frozenset[int],
    waited: float,
) -> postmortem.Decision:
    """`heard`: the last report of each member, and whether the member is still within reach."""
    level = kept(level_kept)
    aged = [(build_report(snap), 0.0 if within else NEVER) for snap, within in heard]
    ranks = postmortem.list_ranks(
        level.members, aged, epoch=level.number, stale=STALE_SECONDS, gone=gone
    )
    return postmortem.decide_post_mortem(
        ranks,
        committed=level.committed,
        waited=waited,
        patience=PATIENCE_SECONDS,
        failed=failed,
    )
