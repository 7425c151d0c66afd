"""A job may train in slots 0 and 5, after it was resized. A lost pod is replaced in its own slot."""

from dataclasses import replace

from everstep_operator.jobs.actions import CreatePod
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.slots import choose_slots
from everstep_operator.model_status import JobStatus, SlotStatus
from job_builders import NOW, TEMPLATE, a_job, a_pod, a_seen, a_slot, a_spec, an_observation

GIVEN_UP = [SlotStatus(slot=s, attempt=2, cause="ScaledDown") for s in range(1, 5)]


def trains_in_0_and_5(*, spares: int = 0) -> Observed:
    spec = a_spec(workers={"replicas": 2, "spares": spares, "template": TEMPLATE})
    status = JobStatus(slots=[a_slot(0), *GIVEN_UP, a_slot(5)], epoch=1, step=40)
    return an_observation(
        job=a_job(spec, status=status),
        pods=(a_pod(0), a_pod(5)),
        seen=a_seen(((0, 1), (5, 1))),
        callers=frozenset({"uid-0-1", "uid-5-1"}),
    )


def after(observed: Observed, status: JobStatus) -> Observed:
    return replace(observed, job=replace(observed.job, status=status))


def creations(observed: Observed) -> list[tuple[int, int, bool]]:
    """(slot, attempt, urgent)"""
    made = [a for a in plan(observed, NOW).actions if isinstance(a, CreatePod)]
    return [(a.slot, a.attempt, a.urgent) for a in made]


def test_a_lost_pod_is_replaced_in_its_own_slot_before_and_after_the_job_continues_without_it() -> (
    None
):
    for members in (((0, 1), (5, 1)), ((0, 1),)):
        lost = replace(trains_in_0_and_5(), pods=(a_pod(0),), seen=a_seen(members))
        counted = plan(lost, NOW)
        assert [(r.slot, r.attempt) for r in counted.status.slots if r.pod_uid is None][-1] == (
            5,
            2,
        )
        assert counted.status.restarts is not None
        assert counted.status.restarts.by_cause == {"PodDeleted": 1}
        assert creations(after(lost, counted.status)) == [(5, 2, True)]


def test_its_incident_stays_open_until_the_next_pod_is_a_member() -> None:
    lost = replace(trains_in_0_and_5(), pods=(a_pod(0),), seen=a_seen(((0, 1),)))
    counted = after(lost, plan(lost, NOW).status)
    waiting = plan(counted, NOW + 1).status
    assert [i.open for i in waiting.incidents] == [True]
    joined = replace(counted, pods=(a_pod(0), a_pod(5, 2)), seen=a_seen(((0, 1), (5, 2))))
    over = plan(after(joined, waiting), NOW + 2).status
    assert [i.open for i in over.incidents] == [False]


def test_a_spare_that_takes_the_place_leaves_the_lost_slot_to_the_next_spare() -> None:
    observed = trains_in_0_and_5(spares=1)
    slots = [a_slot(0), a_slot(1), *GIVEN_UP[1:], a_slot(5, 2, pod_uid=None, cause="NodeLost")]
    took_it = replace(observed, pods=(a_pod(0), a_pod(1)), seen=a_seen(((0, 1), (1, 1))))
    assert creations(after(took_it, JobStatus(slots=slots, epoch=1))) == [(5, 2, False)]


def test_a_slot_that_an_incident_moves_comes_before_one_that_was_replaced_long_ago() -> None:
    observed = trains_in_0_and_5()
    slots = [
        a_slot(0, 2, pod_uid=None, cause="NodeLost"),
        a_slot(1),
        a_slot(5, 2, pod_uid=None, cause="NodeLost", incident="inc-5"),
    ]
    lost = replace(observed, pods=(a_pod(1),), seen=a_seen(((1, 1),)))
    assert creations(after(lost, JobStatus(slots=slots, epoch=1))) == [(5, 2, True)]


def test_a_job_that_was_suspended_continues_in_its_lowest_slots() -> None:
    stopped = [SlotStatus(slot=s, attempt=2, cause="Suspended") for s in (0, 5)]
    status = JobStatus(slots=[stopped[0], *GIVEN_UP, stopped[1]], epoch=1)
    resumed = replace(after(trains_in_0_and_5(), status), pods=(), seen=None)
    assert [slot for slot, _, _ in creations(resumed)] == [0, 1]


def test_awaited_slots_come_after_those_with_a_pod() -> None:
    found = choose_slots([0, 3, 5], [0], [3], [5], replicas=2, spares=0)
    assert found.training == {0, 3}
