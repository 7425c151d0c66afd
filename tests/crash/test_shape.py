"""Unit tests of what the crash suite compares."""

from crash.shape import Object, Shape, build_shape


def a_shape(*pods: str, attempts: dict[int, int]) -> Shape:
    slots = [{"slot": s, "attempt": a, "cause": "NodeGone" * (a > 1)} for s, a in attempts.items()]
    job: Object = {
        "metadata": {"name": "job"},
        "spec": {"workers": {"replicas": 2}},
        "status": {"state": "Running", "slots": slots},
    }
    found = [{"metadata": {"name": f"job-{p}"}, "status": {"phase": "Running"}} for p in pods]
    return build_shape(job, found, [], [])


MOVED = a_shape("0-1", "1-2", attempts={0: 1, 1: 2})


def list_incidents(*incidents: Object) -> tuple[object, ...]:
    job: Object = {
        "metadata": {"name": "job"},
        "spec": {"workers": {"replicas": 2}},
        "status": {
            "slots": [
                {"slot": 0, "attempt": 1, "cause": ""},
                {"slot": 1, "attempt": 2, "cause": "NodeGone"},
            ],
            "incidents": list(incidents),
        },
    }
    return build_shape(job, [], [], []).incidents


def test_deaths_that_one_quarantine_explains_are_one_move() -> None:
    died: Object = {"cause": "WorkerDied", "slot": 1, "quarantine": "inc-1"}
    moved: Object = {"cause": "NodeGone", "slot": 1, "attempt": 1, "quarantine": "inc-1"}
    assert list_incidents(moved) == (("NodeGone", 1, 1, False),)
    assert list_incidents(died, died, moved) == list_incidents(moved)
    assert list_incidents(died, died) == list_incidents(moved), (
        "also if a spare has taken the place"
    )
    unexplained: Object = {"cause": "WorkerDied", "slot": 1}
    assert list_incidents(unexplained, moved) != list_incidents(moved)
    assert list_incidents(died | {"open": True}) != list_incidents(moved)


def test_a_spare_in_the_place_of_a_slot_is_as_good_as_the_slots_next_pod() -> None:
    assert a_shape("0-1", "2-1", attempts={0: 1, 1: 2, 2: 1}) == MOVED


def test_a_spare_that_was_given_back_leaves_no_trace() -> None:
    assert a_shape("0-1", "1-2", attempts={0: 1, 1: 2, 2: 2}) == MOVED


def test_a_spare_that_stays_beside_a_full_job_differs() -> None:
    assert a_shape("0-1", "1-2", "2-1", attempts={0: 1, 1: 2, 2: 1}) != MOVED


def test_a_place_that_stays_empty_differs() -> None:
    assert a_shape("0-1", attempts={0: 1, 1: 2}) != MOVED
