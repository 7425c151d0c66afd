"""Which part of the time without progress counts against a rank."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everstep_agent.coordinator.stuck import FRESH_SECONDS
from everstep_agent.pace import Pace
from everstep_agent.peers import follower
from everstep_agent.peers.agent_report import State
from everstep_agent.pod import progress, progress_watch
from everstep_agent.pod.progress import Progress, Usage
from everstep_agent.pod.worker import Worker
from everstep_contract.position import Mark, Stretch

MARK = Mark(10.0, Stretch.COMPUTE, 0.3)
ASLEEP = Usage(state="S", on_core=1.0, queued=0.0)


def after(*usages: Usage | None, mark: Mark = MARK, every: float = 0.1) -> Progress:
    """The progress after one look for each of `usages`, `every` seconds apart."""
    found, now = Progress(), 10.0
    for usage in usages:
        found, now = progress.look(found, mark, usage, now), now + every
    return found


def test_the_time_of_a_rank_that_sleeps_counts():
    assert after(ASLEEP).overdue(60.0) == 0
    assert after(*[ASLEEP] * 4).overdue(60.0) == pytest.approx(1.0)


def test_the_limit_is_never_longer_than_that_of_the_job():
    long = replace(MARK, limit=100.0)
    assert after(*[ASLEEP] * 11, mark=long).overdue(1.0) == pytest.approx(1.0)


def test_a_rank_without_a_learnt_limit_is_never_overdue():
    assert after(*[ASLEEP] * 99, mark=replace(MARK, limit=0.0)).overdue(60.0) == 0


UNKNOWN = replace(MARK, limit=0.0)
STOPPED = replace(ASLEEP, state="T")


@pytest.mark.parametrize("mark", [UNKNOWN, replace(UNKNOWN, kind=Stretch.SUM), progress.NO_MARK])
def test_one_that_a_signal_has_stopped_is_overdue_even_if_it_has_learnt_no_limit(mark: Mark):
    found = after(*[STOPPED] * 11, mark=mark)
    assert found.overdue(60.0) == pytest.approx(1.0 / progress.STOPPED_SECONDS)
    assert "the limit of a stopped process is 1.0 s" in progress.describe(found, "step 1")
    goes_on = progress.look(found, mark, ASLEEP, 11.1)
    assert goes_on.seconds == goes_on.overdue(60.0) == 0
    debugged = replace(ASLEEP, state="t")
    assert after(*[debugged] * 99, mark=mark).overdue(60.0) == 0


def test_its_children_do_not_make_a_stopped_rank_look_busy():
    assert after(*[replace(STOPPED, helped=True)] * 4).overdue(60.0) == pytest.approx(1.0)


def test_progress_begins_anew():
    before = after(*[ASLEEP] * 9)
    assert progress.look(before, replace(MARK, at=11.0), ASLEEP, 11.1).overdue(60.0) == 0


def test_time_in_which_the_agent_did_not_look_counts_little():
    assert after(ASLEEP, ASLEEP, every=100.0).seconds == progress.MOST_SECONDS


def test_time_in_the_queue_for_a_core_does_not_count():
    queues = Usage(state="R", on_core=1.0, queued=0.0)
    assert after(*[queues] * 20).seconds == 0
    had_queued = replace(ASLEEP, queued=0.06)
    assert after(ASLEEP, had_queued).seconds == pytest.approx(0.04)


@pytest.mark.parametrize("helped", [False, True])
def test_the_time_of_a_rank_that_works_counts_a_tenth(helped: bool):
    usages = [
        replace(ASLEEP, helped=True) if helped else Usage(state="R", on_core=n / 10, queued=0.0)
        for n in range(11)
    ]
    assert after(*usages).seconds == pytest.approx(0.1)


def test_the_time_of_a_rank_that_waits_counts_only_if_it_is_stopped():
    wait = replace(MARK, kind=Stretch.WAIT)
    assert after(*[ASLEEP] * 20, mark=wait).seconds == 0
    stopped = replace(ASLEEP, state="T")
    found = after(*[stopped] * 5, mark=wait)
    assert found.overdue(60.0) == pytest.approx(4 / 3)
    assert "stopped by a signal" in progress.describe(found, "step 7")


SUM = replace(MARK, kind=Stretch.SUM)


def look(mark: Mark, *, until: float, worker_looks: bool = True) -> Progress:
    """The progress if the agent, and a worker that waits for a sum, look ten times a second."""
    found, now = Progress(), mark.at
    while now <= until:
        found = progress.look(
            found, replace(mark, looked=now) if worker_looks else mark, ASLEEP, now
        )
        now += 0.1
    return found


def test_a_rank_that_waits_for_a_sum_and_looks_whether_anything_moves_is_never_overdue():
    assert look(SUM, until=20.0).overdue(60.0) == 0


def test_one_that_no_longer_looks_is_overdue_like_one_that_computes():
    held = look(SUM, until=11.0, worker_looks=False)
    assert held.overdue(60.0) >= 1
    assert look(replace(SUM, kind=Stretch.WAIT), until=11.0, worker_looks=False).overdue(60.0) == 0


def test_for_how_long_nothing_moves_is_told_by_the_worker_not_by_the_clock():
    assert progress.measure_still(replace(SUM, looked=11.5)) == 1.5
    assert progress.measure_still(SUM) == 0, "the worker has not looked since"
    assert progress.measure_still(replace(MARK, looked=11.5)) == 0


def follow(*marks: Mark) -> Progress:
    """The progress after a look at each mark, 0.1 s after it was made."""
    found = Progress()
    for mark in marks:
        found = progress.look(found, mark, ASLEEP, mark.at + 0.1)
    return found


def test_while_a_rank_waits_it_is_known_how_slow_it_was_since_its_last_wait():
    before, slow = replace(SUM, at=8.0), [MARK, replace(MARK, at=10.6), replace(SUM, at=10.7)]
    assert follow(before, *slow).slowed == pytest.approx(2.0)
    assert follow(before, *slow, replace(SUM, at=11.0)).slowed == pytest.approx(2.0)
    assert follow(before, *slow, replace(MARK, at=12.0)).slowed == 0, "the next step begins"
    assert follow(before, *slow[:1], replace(SUM, at=10.1)).slowed == pytest.approx(1 / 3)
    assert follow(before, replace(UNKNOWN, at=9.0), MARK).slowed == 0, "no limit is learnt"


def test_a_rank_that_began_to_wait_since_the_last_look_counts_as_slow_until_now():
    computes, waits = follow(replace(SUM, at=8.0), MARK), follow(MARK, SUM)
    assert progress.measure_slowed(computes, 10.6) == pytest.approx(2.0)
    assert progress.measure_slowed(waits, 99.0) == waits.slowed


def test_a_rank_whose_use_of_cores_is_unknown_is_never_overdue():
    assert after(*[None] * 20).seconds == 0


def test_the_message_says_where_and_against_which_limit():
    found = progress.describe(after(*[ASLEEP] * 5), "step 7")
    assert "no progress for 0.4 s in step 7, computing" in found
    assert "learnt from its last steps is 0.3 s" in found


def test_a_rank_is_looked_at_more_often_once_it_has_made_no_progress():
    moving, still = after(ASLEEP), after(ASLEEP, ASLEEP)
    assert progress_watch.choose_pause(moving) == progress.MOST_SECONDS
    assert progress_watch.choose_pause(still) == progress_watch.LOOK_SECONDS
    again = progress.look(still, replace(MARK, at=11.0), ASLEEP, 11.1)
    assert progress_watch.choose_pause(again) == progress.MOST_SECONDS


@pytest.mark.parametrize("limit", [1.0, 5.0])
def test_as_long_as_nothing_moves_in_a_sum_its_rank_is_reported_often_enough_to_be_judged(
    limit: float,
):
    """The limit may count twice or more, and those of other ranks may be longer: each needs new reports of all."""
    now = 0.0
    page: Any = SimpleNamespace(
        read_mark=lambda: Mark(0.5, Stretch.SUM, 0.3, looked=now, group_limit=limit)
    )
    worker = Worker(
        local=0, life=1, pid=os.getpid(), page=page, page_path="", spawned_at=0.0,
        state=State.TRACKED, in_place=True, epoch=1,
    )  # fmt: skip
    news: list[float] = []
    watch = progress_watch.ProgressWatch(lambda: news.append(now))
    pace = Pace(follower.HEARTBEAT_SECONDS, follower.QUIET_HEARTBEAT_SECONDS, lambda: now)
    ages, reported = [], 0.0
    for look in range(4 * 60):
        now = look * progress_watch.CALM_LOOK_SECONDS
        watch.look([worker], 300.0, now)
        ages.append(now - reported)
        if news or now - reported >= pace.period_seconds:
            reported = now
            if news:
                pace.note_news()
            news.clear()
    assert max(ages[: int(4 * limit)]) <= follower.QUIET_HEARTBEAT_SECONDS
    assert max(ages[int(4 * (limit + 1)) :]) < FRESH_SECONDS


@pytest.mark.parametrize("limit", [0.0, 5.0])
def test_a_rank_with_a_long_limit_or_none_is_looked_at_less_often(limit: float):
    found = after(ASLEEP, ASLEEP, mark=replace(MARK, limit=limit))
    assert progress_watch.choose_pause(found) == progress_watch.CALM_LOOK_SECONDS
    stopped = after(STOPPED, STOPPED, mark=UNKNOWN)
    assert progress_watch.choose_pause(stopped) == progress_watch.LOOK_SECONDS
