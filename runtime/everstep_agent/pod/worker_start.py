"""When a pod starts workers, and what a worker receives when it enters an epoch. Pure."""

import hashlib
import os
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from everstep_agent.peers.epoch_level import EpochLevel, EpochMember
from everstep_agent.peers.messages import Levels
from everstep_agent.peers.places import with_newcomers
from everstep_contract import env, levels, wire


class Files(Protocol):
    """The files of a checkpoint in memory; implemented by `restore.Fetched`."""

    @property
    def manifest_path(self) -> object: ...
    @property
    def places_path(self) -> object: ...


def is_fresh_wanted(published: Levels, slot: int, over: Collection[bool]) -> bool:
    """Whether this slot will be in a next epoch, and the present one is `over` for a local rank."""
    if published.end is not None or published.wanted.stop is not levels.Stop.NONE:
        return False
    if slot in published.wanted.leave:
        return False
    return not over or any(over)


def build_start(
    settings: env.AgentEnv,
    local: int,
    level: EpochLevel,
    mine: EpochMember,
    fetched: Files | None,
) -> wire.Start:
    """`Start` for the pod's worker `local`.

    Args:
        mine: this pod as a member.
        fetched: the checkpoint to start from; None: start at step 0.
    """
    same = _choose_shared(settings, level)
    return wire.Start(
        epoch=level.number,
        rank=mine.ranks[local],
        world=level.world,
        script_world=level.started_world,
        mesh=level.mesh,
        unit=f"unit-{level.mesh.unit_of(mine.ranks[local])}",
        local_rank=local,
        local_world=settings.workers,
        node_rank=mine.node_rank,
        job=settings.job,
        run=settings.run,
        applied=level.resume,
        manifest=str(fetched.manifest_path) if fetched else None,
        places=str(fetched.places_path) if fetched else None,
        staging=os.path.join(settings.memory, "staging"),
        save_every_steps=same.save_every_steps,
        guard_factor=same.guard_factor,
        guard_action=same.guard_action,
    )


def find_member(level: EpochLevel, rank: int) -> EpochMember:
    """The pod of a rank of the epoch."""
    return next(m for m in level.members if rank in m.ranks.values())


def build_join(
    settings: env.AgentEnv, local: int, level: EpochLevel, mine: EpochMember
) -> wire.Start:
    """`Start` for the pod's fresh worker `local`, which is invited to the running epoch `level` as
    `mine`. Its rank and world are the expected ones.
    """
    members = with_newcomers(level.members, level.joining, level.slots_together)
    expected = replace(level, members=members)
    place = expected.member(*mine.id)
    assert place is not None
    start = build_start(settings, local, expected, place, None)
    return replace(start, applied=0, join=True, unit=name_unit(expected, start.rank))


def name_unit(level: EpochLevel, rank: int) -> str:
    """A name that only a unit of exactly these processes has."""
    ids = {
        place: i for m in level.members for place, i in zip(m.ranks.values(), m.ids(), strict=True)
    }
    processes = ";".join(str(ids[mate]) for mate in level.mesh.list_unit_of(rank))
    return f"unit-{hashlib.sha256(processes.encode()).hexdigest()[:16]}"


def build_regroup(local: int, level: EpochLevel, mine: EpochMember) -> wire.Regroup:
    """`Regroup` for the pod's worker `local`. `mine`: this pod as a member of `level`."""
    assert level.in_place is not None
    rank = mine.ranks[local]
    place = level.in_place
    begun = place.find_begun(rank)
    return wire.Regroup(
        epoch=level.number,
        rank=rank,
        world=level.world,
        local_world=len(mine.lives),
        node_rank=mine.node_rank,
        applied=place.applied,
        reductions=place.reductions,
        share=place.shares[rank] if place.shares else None,
        micro_batches=place.micro_batches,
        vector=place.vector if rank in place.behind else "",
        passes=place.passes[level.mesh.unit_of(rank)] if place.passes else 0,
        begun=begun.share if begun else None,
        begun_passes=begun.passes if begun else 0,
        endpoints=place.endpoints,
        complete_buckets=place.complete_buckets,
    )


def _choose_shared(settings: env.AgentEnv, level: EpochLevel) -> env.AgentEnv:
    """Settings that all members of an epoch must share; an older coordinator does not send them."""
    said = {
        "save_every_steps": level.save_every_steps,
        "guard_factor": level.guard_factor,
        "guard_action": level.guard_action,
    }
    return replace(settings, **{k: v for k, v in said.items() if v is not None})  # type: ignore[arg-type]
