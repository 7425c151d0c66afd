"""Pauses after a worker could not join the running ranks."""

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.a_term import SETTINGS
from everstep_agent import logline
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.context import Context
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.client import Pool
from everstep_agent.peers.messages import Levels
from everstep_agent.pod import refusals, spawn
from everstep_agent.pod.pod import Pod
from everstep_agent.pod.relay import Relay
from everstep_agent.pod.worker import Worker
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_contract import levels, wire

NO_PID = 2**31 - 1
PAUSES = refusals.PAUSE_SECONDS
BROKEN = wire.StateTaken(epoch=1, applied=0, problem="RuntimeError('Connection closed by peer')")
DIFFERS = wire.StateTaken(epoch=1, applied=0, problem="global_batch was 16, is 24", differs=True)
PARKED = wire.Parked(epoch=1, step=0, sound=False, why="a collective within its unit has failed")


def test_the_first_refusal_is_tried_again_at_once() -> None:
    told = refusals.refuse({}, 0, "global_batch was 16, is 24", 100.0, differs=True)
    assert refusals.held_locals(told, 100.0) == set()
    assert "cannot join: global_batch was 16, is 24. The other ranks" in refusals.describe(told)


def test_the_pauses_grow_up_to_the_longest() -> None:
    told: refusals.Refusals = {}
    for pause in (*PAUSES, PAUSES[-1]):
        told = refusals.refuse(told, 1, "no", 100.0)
        assert refusals.held_locals(told, 100.0 + 0.9 * pause) == ({1} if pause else set())
        assert refusals.held_locals(told, 100.0 + pause) == set()


def test_each_local_rank_has_its_own() -> None:
    told = refusals.refuse(refusals.refuse({}, 1, "b", 100.0), 1, "b", 100.0)
    assert refusals.held_locals(refusals.refuse(told, 0, "a", 100.0), 101.0) == {1}


def test_nothing_is_told_without_a_refusal() -> None:
    assert refusals.describe({}) == ""


def test_only_what_differs_still_matters_when_all_restart() -> None:
    told = refusals.refuse({}, 0, "a", 100.0, differs=True)
    assert refusals.forget_failed(refusals.refuse(told, 1, "b", 100.0)) == told


# --- what a pod's workers report ------------------------------------------------------------------


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    """A pod that starts and ends no process."""
    store, line = open_store("memory://", "", {}), logline.Log(io.StringIO())
    context = Context(
        settings=replace(SETTINGS, memory=str(tmp_path)),
        me=Identity(slot=0, attempt=0, incarnation=1, address="host-0:7070"),
        store=store,
        run_log=RunLog(store),
        memory=MemoryTier(tmp_path),
        line=line,
    )
    made = Pod(
        context,
        spawner=spawn.SubprocessSpawner("no-script"),
        environ={},
        relay=Relay(Pool("t"), line),
        on_part=lambda part: None,
    )
    made.holds.quiet = True
    monkeypatch.setattr(made.workers, "recycle", lambda epoch: None)
    return made


def report(pod: Pod, frame: wire.StateTaken | wire.Parked, *, invited: bool = True) -> None:
    """A worker that gets ready to join epoch 1 reports this."""
    page: Any = None
    worker = Worker(local=0, life=1, pid=NO_PID, page=page, page_path="", spawned_at=0.0)
    worker.state, worker.joins = State.TRACKED, 1
    pod.workers.fresh = {0: worker} if invited else {}
    pod.frames.take(worker, wire.Envelope(frame=frame))
    pod.workers.fresh = {}


@pytest.mark.parametrize("frame", [BROKEN, DIFFERS, PARKED], ids=["broken", "differs", "parked"])
async def test_whatever_a_worker_reports_its_pod_waits_from_the_second_time_on(
    pod: Pod, frame: wire.StateTaken | wire.Parked
) -> None:
    report(pod, frame)
    assert pod.holds.held_locals == set()
    began = time.monotonic()
    report(pod, frame)
    pod.look(began + PAUSES[1] - 0.1)
    assert pod.holds.held_locals == {0}
    pod.look(time.monotonic() + PAUSES[1] + 0.1)
    assert pod.holds.held_locals == set()


async def test_the_status_says_what_the_worker_has_reported(pod: Pod) -> None:
    report(pod, BROKEN)
    told = pod.build_report(time.monotonic()).not_joined
    assert told.startswith("its rank could not join: RuntimeError('Connection closed by peer'). ")
    assert "check its log, its node, and the node's network" in told


async def test_a_worker_that_was_replaced_has_not_failed(pod: Pod) -> None:
    report(pod, PARKED, invited=False)
    assert pod.build_report(time.monotonic()).not_joined == ""


@pytest.mark.parametrize(("frame", "held"), [(BROKEN, set()), (DIFFERS, {0})])
async def test_if_all_restart_only_a_worker_that_differs_waits(
    pod: Pod, frame: wire.StateTaken, held: set[int]
) -> None:
    """Nobody takes over a state then, and the others would wait for this pod."""
    for _ in range(2):
        report(pod, frame)
    coordinator = levels.SlotAttempt(slot=1, attempt=0)
    pod.apply(Levels(coordinator=coordinator, address="host-1:7070", round=2))
    assert pod.holds.held_locals == held
    assert bool(pod.build_report(time.monotonic()).not_joined) is bool(held)
