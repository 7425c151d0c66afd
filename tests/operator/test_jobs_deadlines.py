"""A job without room gets no pass until something that it waits for changes or one of its limits is over."""

import random
from dataclasses import replace
from typing import Any

import pytest

from everstep_operator.jobs import deadlines, statuspatch
from everstep_operator.jobs.observed import Ended, NodeFact, Observed, Pod, Refusal, Rival
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import GangStatus, JobStatus, StartFailure
from everstep_operator.values import NodeState
from job_builders import (
    NOW,
    a_job,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_verdict,
    an_observation,
)

NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
DAY = 86_400.0
CASES = 300


def a_wait(chance: random.Random) -> Observed:
    """A job of three slots before its first epoch, in a random state of waiting."""
    spec = a_spec()
    if chance.random() < 0.3:
        spec["activeDeadlineSeconds"] = chance.choice([100, 5000])
    pods = [pod for slot in range(3) if (pod := a_waiting_pod(chance, slot)) is not None]
    slots = [a_slot(s, start_failures=some_failures(chance)) for s in range(3)]
    gang = GangStatus(tries=1, since=to_stamp(NOW - 400), retry_at=to_stamp(NOW - 200))
    status = JobStatus(slots=slots, state="Pending", gang=gang if chance.random() < 0.2 else None)
    placed = [p for p in pods if p.node]
    seen = a_seen(members=(), epoch=0, running=False) if placed and chance.random() < 0.3 else None
    rivals = [(), (Rival(holds=True),), (Rival(holds=False, gave_back_at=NOW - 50),)]
    refusal = Refusal(invalid=chance.random() < 0.3, message="quota", generation=1, at=NOW - 5)
    late = chance.random() < 0.3
    return an_observation(
        job=a_job(spec, status=status),
        pods=tuple(pods),
        seen=seen,
        callers=frozenset(p.uid for p in placed if chance.random() < 0.5),
        asked_for={p.uid: chance.uniform(0, 700) for p in placed if p.running_since is not None},
        nodes={p.node: NodeFact(name=p.node, not_ready_for=20.0 if late else None) for p in placed},
        verdicts={p.node: a_verdict(p.node, NodeState.SUSPECT) for p in placed if chance.random() < 0.2},
        suspected_for={p.uid: chance.choice([10.0, 70.0]) for p in placed},
        starting_for={p.uid: chance.uniform(0, 500) for p in placed},
        unplaced_for={p.uid: chance.uniform(0, 900) for p in pods if not p.node},
        rivals=chance.choice(rivals),
        refusal=refusal if len(pods) < 3 else None,
        template_checked=True,
    )  # fmt: skip


def a_waiting_pod(chance: random.Random, slot: int) -> Pod | None:
    kind = chance.choice(["nowhere"] * 16 + ["avoids", "starts", "runs", "refused", "ended", ""])
    nowhere = {"node": "", "ip": "", "phase": "Pending", "running_since": None}
    match kind:
        case "nowhere":
            return a_pod(slot, scheduling=NO_ROOM, **nowhere)
        case "avoids":
            return a_pod(slot, scheduling=NO_ROOM, avoids=frozenset({"bad"}), **nowhere)
        case "starts":
            return a_pod(slot, phase="Pending", running_since=None, waiting="ContainerCreating")
        case "runs":
            return a_pod(slot, running_since=NOW - chance.uniform(0, 700))
        case "refused":
            changes = {"reason": "UnexpectedAdmissionError", "running_since": None}
            return a_pod(slot, phase="Failed", created_at=NOW - 3, **changes)
        case "ended":
            ended = Ended(exit_code=1, reason="Error", message="", report=None, finished_at=NOW - 2)
            return a_pod(slot, running_since=None, last_ended=ended, restarts=1)
        case _:
            return None


def some_failures(chance: random.Random) -> list[StartFailure]:
    return [
        StartFailure(node="bad", at=to_stamp(NOW - chance.choice([100, 3000])), reason="r")
        for _ in range(chance.choice([0, 0, 1, 2]))
    ]


def settle(observed: Observed) -> Observed | None:
    """Repeat passes until they no longer change the status; return the observation.

    None if a pass has something to do, or the job does not wait for room.
    """
    for _ in range(5):
        planned = plan(observed, NOW)
        if planned.actions or planned.counts:
            return None
        if planned.status == observed.job.status:
            return observed if deadlines.waits_for_room(observed, NOW) else None
        observed = replace(observed, job=replace(observed.job, status=planned.status))
    return None


def later(observed: Observed, seconds: float) -> Observed:
    """The same observation `seconds` later: only its ages have grown."""

    def aged(held: Any) -> dict[str, float]:
        return {name: age + seconds for name, age in held.items()}

    nodes = {
        n: replace(f, not_ready_for=None if f.not_ready_for is None else f.not_ready_for + seconds)
        for n, f in observed.nodes.items()
    }
    return replace(
        observed,
        nodes=nodes,
        asked_for=aged(observed.asked_for),
        starting_for=aged(observed.starting_for),
        unplaced_for=aged(observed.unplaced_for),
        suspected_for=aged(observed.suspected_for),
    )


def test_between_two_looks_there_is_nothing_to_do() -> None:
    looked = slept = 0
    for seed in range(CASES):
        chance = random.Random(seed)
        observed = settle(a_wait(chance))
        if observed is None:
            continue
        looked += 1
        pause = plan(observed, NOW).wake_after
        slept += pause is None
        end = DAY if pause is None else pause - deadlines.MARGIN_SECONDS - 0.1
        for moment in [end, *(chance.uniform(0, end) for _ in range(4))]:
            if moment <= 0:
                continue
            planned = plan(later(observed, moment), NOW + moment)
            told = f"seed {seed}: after {moment:.1f} s of {pause}"
            assert not planned.actions, told
            assert not planned.counts, told
            document = statuspatch.to_document(observed.job.status)
            assert statuspatch.decide_patch(document, planned.status, NOW + moment, 0.0) == {}, told
    assert looked > CASES / 10
    assert slept > 2


def test_a_limit_that_is_over_is_met_by_the_look() -> None:
    spec = a_spec(activeDeadlineSeconds=1000)
    nowhere = [
        a_pod(s, node="", ip="", phase="Pending", running_since=None, scheduling=NO_ROOM)
        for s in range(3)
    ]
    status = JobStatus(slots=[a_slot(s) for s in range(3)], state="Pending")
    waiting = an_observation(
        job=a_job(spec, status=status), pods=tuple(nowhere), seen=None, callers=frozenset()
    )
    pause = plan(waiting, NOW).wake_after
    assert pause == pytest.approx(1000 - 60 + deadlines.MARGIN_SECONDS)
    assert plan(waiting, NOW + (pause or 0.0)).counts
