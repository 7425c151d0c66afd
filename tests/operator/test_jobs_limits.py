"""How much of a job moves at once: a tenth of its nodes, and one pod per node that is free."""

from dataclasses import replace

import pytest

from everstep_operator.jobs.actions import Plan
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import JobStatus
from everstep_operator.values import NodeState
from job_builders import (
    NOW,
    TEMPLATE,
    a_job,
    a_left,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    a_verdict,
    an_observation,
)

NO_ROOM = "0/40 nodes are available"


def a_large_job(slots: int = 30, **changes: object) -> Observed:
    """A training job with one node for each slot."""
    observed = an_observation(
        job=a_job(a_spec(replicas=slots), status=a_status(slots)),
        pods=tuple(a_pod(s) for s in range(slots)),
        seen=a_seen([(s, 1) for s in range(slots)]),
        callers=frozenset(f"uid-{s}-1" for s in range(slots)),
        nodes={f"node-{s}": NodeFact(name=f"node-{s}") for s in range(slots)},
    )
    return replace(observed, **changes)  # type: ignore[arg-type]


def convicted(*slots: int, state: NodeState = NodeState.LEAVING) -> dict[str, object]:
    nodes = [f"node-{s}" for s in slots]
    return {"verdicts": {n: a_verdict(n, state, incident=f"inc-{n}") for n in nodes}}


def asked(planned: Plan) -> tuple[int, ...]:
    assert planned.wanted is not None
    return planned.wanted.leave


def held(planned: Plan) -> tuple[int, ...]:
    assert planned.wanted is not None
    return planned.wanted.hold


def attempts(planned: Plan) -> list[int]:
    return [record.attempt for record in planned.status.slots]


# --- leaving ----------------------------------------------------------------------------------------------


def test_verdicts_on_every_node_make_a_job_leave_a_tenth_of_them_at_a_time() -> None:
    planned = plan(a_large_job(**convicted(*range(30))), NOW)
    assert asked(planned) == (0, 1, 2)
    assert attempts(planned) == [1] * 30
    assert planned.status.message is not None
    assert "27 more nodes wait for their turn" in planned.status.message


def test_a_small_job_leaves_one_node_at_a_time() -> None:
    assert asked(plan(a_large_job(3, **convicted(0, 1, 2)), NOW)) == (0,)


def test_all_pods_on_one_node_leave_together() -> None:
    observed = a_large_job(6, **convicted(0, 1, 2))
    pods = tuple(replace(p, node=f"node-{p.slot % 3}") for p in observed.pods)
    assert asked(plan(replace(observed, pods=pods), NOW)) == (0, 3)


def test_who_has_been_asked_stays_asked_though_another_comes_first() -> None:
    observed = a_large_job(3, **convicted(1, 2))
    slots = [a_slot(0), a_slot(1), a_slot(2, leaving_since=to_stamp(NOW - 5))]
    job = a_job(a_spec(replicas=3), status=a_status(slots=slots))
    assert asked(plan(replace(observed, job=job), NOW)) == (2,)


def test_the_next_is_asked_once_the_job_trains_again() -> None:
    moving = a_job_whose_first_slot_moved(incident="inc-0")
    assert asked(plan(moving, NOW)) == ()
    trains = replace(moving, seen=a_seen([(0, 2), (1, 1), (2, 1)]))
    assert asked(plan(trains, NOW)) == (1,)


def test_a_move_that_is_over_holds_no_later_leave_back() -> None:
    """Even if the job does not train now, perhaps because of the node that it should leave."""
    assert asked(plan(a_job_whose_first_slot_moved(incident=None), NOW)) == (1,)


def test_a_slot_that_finds_no_node_holds_no_leave_back_once_the_others_have_trained_without_it() -> (
    None
):
    """Without another leave, three of four would wait for the second faulty node without end."""
    workers = {"replicas": 4, "minReplicas": 3, "template": TEMPLATE}
    job = a_job(a_spec(workers=workers), status=a_status(4))
    first = again(a_large_job(4, **convicted(0), job=job), NOW)
    others = a_seen([(1, 1), (2, 1), (3, 1)])
    left = again(replace(first, seen=replace(others, running=False, left=(a_left(0),))), NOW + 5)
    waits = a_pod(0, 2, node="", running_since=None, phase="Pending")
    moved = replace(left, pods=(waits, *left.pods[1:]), **convicted(0, 1))
    stands = replace(moved, seen=replace(others, running=False))
    assert asked(plan(stands, NOW + 6)) == (), "the job has not trained since"
    trained = again(replace(moved, seen=others, **convicted(0)), NOW + 7)
    assert asked(plan(replace(stands, job=trained.job), NOW + 86400)) == (1,)


def again(observed: Observed, now: float) -> Observed:
    return replace(observed, job=replace(observed.job, status=plan(observed, now).status))


def a_job_whose_first_slot_moved(incident: str | None) -> Observed:
    """It does not train; now the node of slot 1 is convicted, too."""
    first = a_slot(
        0, 2, cause="NodeLeaving", former_node="node-0", node="node-9", incident=incident
    )
    job = a_job(status=a_status(slots=[first, a_slot(1), a_slot(2)]))
    observed = a_large_job(3, **convicted(0, 1), job=job)
    pods = (a_pod(0, 2, node="node-9"), a_pod(1), a_pod(2))
    nodes = {**observed.nodes, "node-9": NodeFact(name="node-9")}
    return replace(observed, pods=pods, nodes=nodes, seen=a_seen(running=False))


def test_who_has_left_is_replaced_whatever_the_limit_says() -> None:
    observed = a_large_job(3, **convicted(0, 1, 2))
    left = a_seen(running=False, left=(a_left(2),))
    assert attempts(plan(replace(observed, seen=left), NOW)) == [1, 1, 2]


def test_nodes_that_all_lose_their_heartbeats_are_not_all_left_while_their_ranks_step() -> None:
    nodes = {
        f"node-{s}": NodeFact(name=f"node-{s}", not_ready_for=61.0, why="no heartbeat")
        for s in range(30)
    }
    assert asked(plan(a_large_job(nodes=nodes), NOW)) == (0, 1, 2)


def test_pods_with_a_deadline_are_all_asked_at_once() -> None:
    """A drain or an eviction sets a deadline: what is not saved within the grace period is lost."""
    pods = tuple(a_pod(s, deleting_until=NOW + 30) for s in range(4))
    assert asked(plan(a_large_job(4, pods=pods), NOW)) == (0, 1, 2, 3)


def test_what_is_gone_is_replaced_at_once_however_much_it_is() -> None:
    planned = plan(a_large_job(4, **convicted(0, 1, 2, state=NodeState.GONE)), NOW)
    assert attempts(planned) == [2, 2, 2, 1]


# --- suspicion --------------------------------------------------------------------------------------------


def test_a_suspicion_on_every_node_does_not_keep_the_job_from_starting_an_epoch() -> None:
    suspected = convicted(*range(30), state=NodeState.SUSPECT)
    planned = plan(a_large_job(**suspected, seen=a_seen(running=False)), NOW)
    assert held(planned) == (0, 1, 2)


@pytest.mark.parametrize(("seconds", "slots"), [(59.0, (1,)), (61.0, ())])
def test_a_slot_is_held_out_of_an_epoch_for_a_minute_at_most(
    seconds: float, slots: tuple[int, ...]
) -> None:
    observed = a_large_job(3, **convicted(1, state=NodeState.SUSPECT), seen=a_seen(running=False))
    assert held(plan(replace(observed, suspected_for={"uid-1-1": seconds}), NOW)) == slots


# --- nodes that are free again ----------------------------------------------------------------------------


def waiting(slots: int, *, avoids: frozenset[str], scouts: int = 0) -> Observed:
    """A job whose pods have no node. All but the first `scouts` exclude the nodes in `avoids`."""
    pods = tuple(
        a_pod(
            s, phase="Pending", node="", running_since=None, scheduling=NO_ROOM,
            avoids=frozenset() if s < scouts else avoids,
        )
        for s in range(slots)
    )  # fmt: skip
    status = JobStatus(slots=[a_slot(s, node=None) for s in range(slots)])
    job = a_job(a_spec(replicas=slots), status=status)
    return an_observation(job=job, pods=pods, seen=None, callers=frozenset())


def test_a_node_that_is_free_again_makes_one_pod_anew_not_all_that_wait() -> None:
    planned = plan(waiting(20, avoids=frozenset({"node-5"})), NOW)
    assert attempts(planned) == [2, *[1] * 19]


def test_each_of_several_nodes_that_are_free_again_gets_a_pod() -> None:
    planned = plan(waiting(20, avoids=frozenset({"node-4", "node-5"})), NOW)
    assert attempts(planned) == [2, 2, *[1] * 18]


def test_no_other_is_made_anew_while_one_that_may_use_the_node_finds_no_room() -> None:
    assert not plan(waiting(20, avoids=frozenset({"node-5"}), scouts=1), NOW).counts


def test_the_next_is_made_anew_once_the_first_has_found_its_node() -> None:
    observed = waiting(20, avoids=frozenset({"node-5"}), scouts=1)
    placed = replace(observed.pods[0], node="node-5", scheduling="")
    planned = plan(replace(observed, pods=(placed, *observed.pods[1:])), NOW)
    assert attempts(planned) == [1, 2, *[1] * 18]


def test_a_pod_that_the_scheduler_has_not_looked_at_is_left_alone() -> None:
    observed = waiting(3, avoids=frozenset({"node-5"}))
    pods = tuple(replace(p, scheduling="") for p in observed.pods)
    assert not plan(replace(observed, pods=pods), NOW).counts
