"""Near which slots' pods a pod should run, because they form a unit with it."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_contract import levels, names
from everstep_operator.jobs import affinities
from everstep_operator.jobs.actions import CreatePod
from everstep_operator.jobs.neighbours import MOST_MATES, Seat, choose_mates, find_seats
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.slots import list_units, order_members
from everstep_operator.values import NodeState
from job_builders import (
    NOW,
    TEMPLATE,
    a_job,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    a_verdict,
    an_observation,
)


def spec_of(replicas: int, *, shard: int = 2, **workers: Any) -> dict[str, Any]:
    return a_spec(
        workers={"template": TEMPLATE, "replicas": replicas, **workers},
        parallelism={"shard": shard},
    )


def observation(
    members: tuple[int, ...],
    slots: int = 4,
    *,
    shard: int = 2,
    lost: tuple[int, ...] = (),
    **more: Any,
) -> Observed:
    """`members` has slots in the order of ranks. The slots in `lost` wait for their second pod."""
    workers = {"replicas": 4, **more.pop("workers", {})}
    records = [a_slot(s, 2, pod_uid=None) if s in lost else a_slot(s) for s in range(slots)]
    return an_observation(
        job=a_job(spec_of(shard=shard, **workers), status=a_status(slots=records)),
        pods=tuple(a_pod(s) for s in range(slots) if s not in lost),
        seen=a_seen([(s, 1) for s in members]),
        **more,
    )


def units_of(observed: Observed) -> set[tuple[int, ...]]:
    return {seat.unit for seat in find_seats(observed).values()}


def test_at_first_neighbours_form_units() -> None:
    fresh = an_observation(job=a_job(spec_of(4)), pods=(), seen=None)
    seats = find_seats(fresh)
    assert seats[0] == Seat(unit=(0, 1), place=0)
    assert seats[3] == Seat(unit=(2, 3), place=1)
    assert len(seats) == 4


@pytest.mark.parametrize(("shard", "processes"), [(1, 1), (2, 2), (2, 4)])
def test_a_pod_that_holds_whole_units_has_no_mates(shard: int, processes: int) -> None:
    spec = spec_of(4, shard=shard, processesPerWorker=processes)
    fresh = an_observation(job=a_job(spec), pods=(), seen=None)
    assert find_seats(fresh) == {}


def test_members_stay_with_those_that_they_train_with() -> None:
    assert units_of(observation((0, 3, 1, 2))) == {(0, 3), (1, 2)}


def test_what_is_left_of_lost_units_forms_units_as_the_job_takes_them_in() -> None:
    assert units_of(observation((2, 3), lost=(1,))) == {(0, 1), (2, 3)}
    assert units_of(observation((0, 3, 1), lost=(2,))) == {(0, 3), (1, 2)}
    assert units_of(observation((0, 1), lost=(2, 3))) == {(0, 1), (2, 3)}
    assert units_of(observation((0, 3, 1, 2), lost=())) == {(0, 3), (1, 2)}
    assert units_of(observation((0, 3), lost=(2,))) == {(0, 3), (1, 2)}
    whole = observation((0, 3, 1, 2), lost=(0,))
    assert whole.seen is not None
    first_lost = replace(whole, seen=replace(whole.seen, members=whole.seen.members[1:]))
    assert units_of(first_lost) == {(0, 3), (1, 2)}


def test_a_unit_of_spares_is_one_of_its_own() -> None:
    workers = {"spares": 2}
    assert units_of(observation((0, 1, 2, 3), 6, workers=workers)) == {(0, 1), (2, 3), (4, 5)}
    taken = observation((2, 3, 4, 5), 6, lost=(1,), workers=workers)
    assert units_of(taken) == {(0, 1), (2, 3), (4, 5)}


def test_a_single_spare_belongs_to_the_unit_that_may_lose_a_pod() -> None:
    doubt = {"node-1": a_verdict("node-1", NodeState.SUSPECT, evidence=("gpu-1",))}
    observed = observation((0, 1, 2, 3), verdicts=doubt)
    assert observed.slots.spares == {4}
    assert units_of(observed) == {(0, 4), (2, 3)}


def test_without_a_spare_the_unit_of_a_pod_in_doubt_stays_as_it_is() -> None:
    bad = {"node-1": a_verdict("node-1", NodeState.LEAVING)}
    observed = observation(
        (4, 5, 6, 7), 8, shard=4, lost=(2,), workers={"replicas": 8}, verdicts=bad
    )
    assert units_of(observed) == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_a_slot_without_a_whole_unit_has_no_seat() -> None:
    observed = observation((0, 1), 3, lost=(2,), workers={"replicas": 2})
    assert set(find_seats(observed)) == {0, 1}


def test_the_nearest_in_the_unit_come_first_and_nobody_on_a_shunned_node() -> None:
    seat = Seat(unit=(4, 9, 2, 7, 5), place=2)
    nodes = {slot: f"node-{slot}" for slot in range(9)}
    assert choose_mates(seat, nodes, ()) == (9, 7, 4, 5)
    assert choose_mates(seat, nodes, {"node-7", "node-4"}) == (9, 5)
    assert choose_mates(Seat(unit=(4, 9), place=0), nodes, ()) == (9,)
    assert choose_mates(None, nodes, ()) == ()


def test_a_pod_names_no_more_mates_than_the_limit() -> None:
    unit = tuple(range(1000))
    mates = choose_mates(Seat(unit=unit, place=500), {501: "bad"}, {"bad"})
    assert len(mates) == MOST_MATES
    assert set(mates) == {*range(483, 517)} - {500, 501}
    assert choose_mates(Seat(unit=unit, place=0), {}, ()) == tuple(range(1, MOST_MATES + 1))


# --- the pods that are created --------------------------------------------------------------------


def drawn(observed: Observed) -> dict[int, list[str]]:
    """Slot → the slots that its new pod prefers to be near."""
    made = [a for a in plan(observed, NOW).actions if isinstance(a, CreatePod)]
    return {a.slot: mates_of(a.body["spec"].get("affinity") or {}) for a in made}


def mates_of(affinity: dict[str, Any], kind: str = "podAffinity") -> list[str]:
    terms = (affinity.get(kind) or {}).get(affinities.PREFERRED) or []
    found = [t["podAffinityTerm"]["labelSelector"].get("matchExpressions") for t in terms]
    if not found or found[0] is None:
        return []
    (expression,) = found[0]
    assert expression["key"] == names.LABEL_SLOT
    assert found == [[expression]] * len(found)
    return list(expression["values"])


def test_each_pod_of_a_new_job_is_drawn_to_its_unit() -> None:
    fresh = an_observation(job=a_job(spec_of(4)), pods=(), seen=None)
    assert drawn(fresh) == {0: ["1"], 1: ["0"], 2: ["3"], 3: ["2"]}
    single = an_observation(job=a_job(spec_of(2, shard=1)), pods=(), seen=None)
    assert drawn(single) == {0: [], 1: []}


def test_the_next_pod_of_a_lost_slot_is_drawn_to_what_is_left_of_its_unit() -> None:
    assert drawn(observation((2, 3), lost=(1,))) == {1: ["0"]}


@pytest.mark.parametrize("state", [NodeState.LEAVING, NodeState.SUSPECT])
def test_a_mate_on_a_node_in_question_draws_nobody_there(state: NodeState) -> None:
    question = {"node-0": a_verdict("node-0", state)}
    assert drawn(observation((2, 3), lost=(1,), verdicts=question)) == {1: []}
    elsewhere = {"node-5": a_verdict("node-5", state)}
    assert drawn(observation((2, 3), lost=(1,), verdicts=elsewhere)) == {1: ["0"]}


def test_of_a_mate_the_present_pod_counts_not_the_one_that_is_going() -> None:
    observed = observation(
        (2, 3), lost=(0, 1), verdicts={"node-0": a_verdict("node-0", NodeState.GONE)}
    )
    going = a_pod(0, deleting_until=NOW + 20)
    assert drawn(replace(observed, pods=(going, *observed.pods))) == {0: ["1"], 1: ["0"]}


def test_spares_keep_away_from_all_but_their_own_unit() -> None:
    fresh = an_observation(job=a_job(spec_of(2, spares=2)), pods=(), seen=None)
    made = [a for a in plan(fresh, NOW).actions if isinstance(a, CreatePod)]
    found = {a.slot: a.body["spec"]["affinity"] for a in made}
    assert {slot: mates_of(affinity) for slot, affinity in found.items()} == {
        0: ["1"], 1: ["0"], 2: ["3"], 3: ["2"],
    }  # fmt: skip
    assert mates_of(found[2], "podAntiAffinity") == ["3"]
    assert "podAntiAffinity" not in found[0]


# --- units stay whole when a job shrinks ----------------------------------------------------------


def test_the_slots_of_units_by_rank() -> None:
    members = a_seen([(0, 1), (5, 1), (2, 1), (3, 1)]).members
    assert list_units(members, 2) == [(0, 5), (2, 3)]
    assert list_units(members[1:], 2) == [(5,), (2, 3)]
    assert list_units((), 2) == []
    of_one_pod = [levels.Member(slot=7, attempt=1, incarnation=1, rank=r, life=1) for r in range(4)]
    assert list_units(of_one_pod, 4) == [(7,)]
    assert list_units(of_one_pod, 2) == [(7,), (7,)]


def test_whole_units_are_kept_first() -> None:
    units, every = [(0, 5), (2, 3)], frozenset({0, 2, 3, 5})
    assert order_members(units, every, frozenset(), 2) == (0, 5, 2, 3)
    assert order_members(units, every, frozenset({5}), 2) == (2, 3, 0, 5)
    assert order_members(units, every - {0}, frozenset(), 2) == (2, 3, 5)
    assert order_members([(5,), (2, 3)], every - {0}, frozenset(), 2) == (2, 3, 5)
    assert order_members([(7,), (7,), (1,)], frozenset({1, 7}), frozenset(), 1) == (1, 7)
    assert order_members([(1,), (7,)], frozenset({1, 7}), frozenset({1}), 1) == (7, 1)


def test_a_job_that_shrinks_keeps_a_whole_unit() -> None:
    assert observation((0, 3, 1, 2), workers={"replicas": 2}).slots.training == {0, 3}
    assert observation((0, 1, 2, 3), workers={"replicas": 2}).slots.training == {0, 1}
    left = observation((0, 1, 2, 3), workers={"replicas": 2})
    records = [a_slot(0, leaving_since="2001-09-09T01:46:30Z"), *(a_slot(s) for s in (1, 2, 3))]
    asked = replace(left, job=replace(left.job, status=a_status(slots=records)))
    assert asked.slots.training == {2, 3}
