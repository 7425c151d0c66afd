"""Pauses after a worker was refused by the running ranks."""

from everstep_agent.pod import refusals

PAUSES = refusals.PAUSE_SECONDS


def test_the_first_refusal_is_tried_again_at_once() -> None:
    told = refusals.refuse({}, 0, "global_batch was 16, is 24", 100.0)
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
