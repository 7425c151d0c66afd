"""The cost of the coordinator's work as the job grows."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.given import a_worker, an_epoch, stepping, wanting
from everstep_agent.coordinator import members, rounds, seen_document
from everstep_agent.coordinator.breaks import find_break, list_breaks
from everstep_agent.coordinator.reports import Reports
from everstep_agent.peers.agent_report import State
from everstep_contract import levels

FEW, MANY = 32, 1024
NOISE = 8
"""The allowed factor. Work quadratic in the number of agents would cost four times as much."""


def best(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(7):
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return min(spent)


def a_job(count: int):
    peers = tuple(levels.Peer(slot=s, attempt=0, address=f"host-{s}") for s in range(count))
    return an_epoch(count), [stepping(s) for s in range(count)], wanting(count, peers=peers)


def look_for_breaks(count: int) -> Callable[[], object]:
    epoch, reports, wanted = a_job(count)
    aged = [(r, 0.1) for r in reports]
    return lambda: list_breaks(epoch, aged, wanted, idle=0.1, hang=300.0)


def lose_all(count: int) -> Callable[[], object]:
    epoch, reports, wanted = a_job(count)
    dead = a_worker(state=State.DEAD, why="killed")
    aged = [(replace(r, workers=(dead,)), 0.1) for r in reports]
    return lambda: find_break(epoch, aged, wanted, idle=0.1, hang=300.0)


def look_around(count: int) -> Callable[[], object]:
    epoch, reports, wanted = a_job(count)
    return lambda: (
        members.list_workers(epoch, reports),
        members.list_applied(epoch, reports),
        rounds.list_eligible(reports, wanted),
    )


def say_it(count: int) -> Callable[[], object]:
    epoch, reports, _ = a_job(count)
    me = levels.SlotAttempt(slot=0, attempt=0)
    facts = seen_document.Facts(run="r", coordinator=me, restarts={}, seconds={})
    return lambda: seen_document.build_seen(facts, epoch, [(r, 0.1) for r in reports])


@pytest.mark.parametrize("work", [look_for_breaks, lose_all, look_around, say_it])
def test_a_turns_work_grows_with_the_agents_not_with_their_square(
    work: Callable[[int], Callable[[], object]],
) -> None:
    assert best(work(MANY)) < NOISE * (MANY // FEW) * best(work(FEW))


def test_a_report_costs_the_same_however_many_agents_there_are() -> None:
    def take(count: int) -> Callable[[], object]:
        known = Reports()
        for s in range(count):
            known.take(stepping(s), 0.0)

        def take_hundred() -> None:
            for n in range(100):
                known.take(stepping(7, applied=n), 1.0)

        return take_hundred

    assert best(take(MANY)) < NOISE * best(take(FEW))


def test_a_report_that_says_only_how_far_training_has_come_wakes_nobody() -> None:
    known = Reports()
    known.take(stepping(0, applied=5), 0.0)
    assert known.changed.is_set(), "the first report of an agent must wake the coordinator"
    known.changed.clear()
    later = stepping(0, applied=6, phase=2, waiting=True, waited=0.1, slowed=0.2)
    known.take(replace(later, seconds={"step": 3.0}), 0.3)
    assert not known.changed.is_set()
    leaving = replace(stepping(0, applied=6), leaving=True, notice=5.0)
    known.take(leaving, 0.4)
    known.changed.clear()
    known.take(replace(leaving, notice=4.9), 0.5)
    assert not known.changed.is_set(), "a notice runs out with the time"
    known.take(stepping(0, applied=6, state=State.DEAD, why="killed"), 0.6)
    assert known.changed.is_set(), "a death must wake the coordinator"


@pytest.mark.parametrize(
    "news",
    [
        {"acked": 8}, {"passed": 9}, {"leaving": True}, {"staged": 6}, {"cut": 1}, {"joined": 2},
        {"storage_error": levels.StorageError(kind="Denied", message="m")},
    ],
    ids=lambda v: next(iter(v)),
)  # fmt: skip
def test_what_there_is_to_act_on_wakes_the_coordinator(news: dict[str, object]) -> None:
    known = Reports()
    known.take(stepping(0), 0.0)
    known.changed.clear()
    known.take(replace(stepping(0), **news), 0.1)  # type: ignore[arg-type]
    assert known.changed.is_set()
