"""Builds a coordinator's term without a job, for tests of its state and levels."""

import io
from dataclasses import replace
from pathlib import Path

from everstep_agent import logline
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.context import Context
from everstep_agent.coordinator.term import Term
from everstep_agent.identity import Identity
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.peers.messages import Levels
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_contract import env, levels

SETTINGS = env.AgentEnv(
    job="ns/job", job_uid="uid", slot=0, attempt=0, token="t", pod_ip="127.0.0.1", uri="memory://",
    run="ns/job", memory="", termination_log="",
)  # fmt: skip


def a_term(wanted: levels.Wanted, *, inherited: Levels | None = None, **settings: object) -> Term:
    store = open_store("memory://", "", {})
    context = Context(
        settings=replace(SETTINGS, **settings),  # type: ignore[arg-type]
        me=Identity(slot=0, attempt=0, incarnation=1, address="host-0:7070"),
        store=store,
        run_log=RunLog(store),
        memory=MemoryTier(Path("no-folder")),
        line=logline.Log(io.StringIO()),
    )
    return Term(context, inherited, wanted, GroupStore())
