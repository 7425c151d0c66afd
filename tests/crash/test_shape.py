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


def test_a_spare_in_the_place_of_a_slot_is_as_good_as_the_slots_next_pod() -> None:
    assert a_shape("0-1", "2-1", attempts={0: 1, 1: 2, 2: 1}) == MOVED


def test_a_spare_that_was_given_back_leaves_no_trace() -> None:
    assert a_shape("0-1", "1-2", attempts={0: 1, 1: 2, 2: 2}) == MOVED


def test_a_spare_that_stays_beside_a_full_job_differs() -> None:
    assert a_shape("0-1", "1-2", "2-1", attempts={0: 1, 1: 2, 2: 1}) != MOVED


def test_a_place_that_stays_empty_differs() -> None:
    assert a_shape("0-1", attempts={0: 1, 1: 2}) != MOVED
