"""When a pod starts workers, and what one is told when it enters an epoch. Pure."""

import os
from collections.abc import Collection

from everstep_agent.checkpoint.restore import Fetched
from everstep_agent.messages import EpochLevel, EpochMember, Levels
from everstep_agent.workers import Worker
from everstep_contract import env, levels, wire


def is_fresh_wanted(published: Levels, slot: int, current: Collection[Worker]) -> bool:
    """Whether there will be a next epoch for this slot, and this one is over for a worker of ours."""
    if published.end is not None or published.wanted.stop is not levels.Stop.NONE:
        return False
    if slot in published.wanted.leave:
        return False
    return not current or any(not w.alive or w.cut_at is not None or w.asked for w in current)


def build_start(
    settings: env.AgentEnv,
    local: int,
    level: EpochLevel,
    mine: EpochMember,
    fetched: Fetched | None,
) -> wire.Start:
    """For the pod's worker `local`; `mine`: this pod in the epoch; `fetched` None: it begins at step 0."""
    every = level.save_every_steps
    return wire.Start(
        epoch=level.number,
        rank=mine.node_rank * settings.workers + local,
        world=level.world,
        local_rank=local,
        local_world=settings.workers,
        node_rank=mine.node_rank,
        job=settings.job,
        run=settings.run,
        applied=level.resume,
        manifest=str(fetched.manifest_path) if fetched else None,
        chunks=str(fetched.chunks) if fetched else None,
        staging=os.path.join(settings.memory, "staging"),
        save_every_steps=settings.save_every_steps if every is None else every,
        guard_factor=settings.guard_factor,
        guard_action=settings.guard_action,
        hang_seconds=settings.hang_seconds,
    )
