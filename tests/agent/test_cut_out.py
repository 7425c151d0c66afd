"""Which ranks the coordinator has cut out."""

from dataclasses import replace

from agent.given import a_report, a_worker, an_epoch
from everstep_agent.coordinator.hung import (
    CALM_SECONDS,
    Patience,
    keep_named,
    list_hung,
    list_new,
)
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import Hung, Stage
from everstep_contract.sums import Sums, describe_missed

WAITS = {"waiting": True}
OVERDUE = {"overdue": 1.2}
COMPUTES: dict[str, object] = {}


def aged(reports: list[AgentReport]) -> list[tuple[AgentReport, float]]:
    return [(report, 0.1) for report in reports]


def find(*ranks: dict[str, object], factor: float = 1, **changes: object) -> list[int]:
    """Slots of the ranks that are cut out."""
    reports = [a_report(n, epoch=1, workers=(a_worker(**r),)) for n, r in enumerate(ranks)]
    return [h.slot for h in list_hung(an_epoch(len(ranks), **changes), aged(reports), factor)]


def test_a_rank_for_which_all_others_wait_is_cut_out():
    reports = [a_report(0, epoch=1, workers=(a_worker(**WAITS),)),
               a_report(1, epoch=1, workers=(a_worker(**OVERDUE),))]  # fmt: skip
    assert list_hung(an_epoch(2), aged(reports), 1) == (Hung(slot=1, local=0, life=1),)


def test_the_sum_that_it_holds_up_is_named():
    wait = Sums(step=6, reduction=0, buckets=2, joined=3, complete=1)
    own = replace(wait, joined=1)
    reports = [
        a_report(0, epoch=1, workers=(a_worker(**WAITS, sums=wait),)),
        a_report(1, epoch=1, workers=(a_worker(**OVERDUE, sums=own),)),
    ]
    (hung,) = list_hung(an_epoch(2), aged(reports), 1)
    assert hung.missed == describe_missed(own, [wait])
    assert "bucket 2 of 2" in hung.missed


def test_nobody_is_cut_out_while_another_rank_computes():
    assert find(WAITS, OVERDUE, COMPUTES) == []


def test_nobody_is_cut_out_if_most_make_no_progress():
    assert find(OVERDUE, OVERDUE, OVERDUE) == []
    assert find(OVERDUE, OVERDUE, WAITS) == []
    assert find(OVERDUE, WAITS, WAITS, OVERDUE) == [0, 3]


def test_the_last_rank_in_a_step_that_was_slow_on_others_too_is_not_cut_out():
    """As with an export on all ranks: one of them finishes last."""
    slow = {**WAITS, "slowed": 6.0}
    assert find(slow, slow, {"overdue": 7.0}) == []
    assert find(slow, slow, {"overdue": 9.0}) == [2]
    assert find(WAITS, slow, {"overdue": 7.0}) == [], "one other is enough"
    assert find({**WAITS, "slowed": 0.9}, WAITS, OVERDUE) == [2], "a usual step"
    stopped = {"overdue": 2.0, "stopped": True, "stopped_long": True}
    assert find(slow, slow, stopped) == [2], "it is not slow"


def test_a_rank_that_was_stopped_while_it_waited_is_cut_out():
    assert find(WAITS, {**WAITS, **OVERDUE}) == [1]


def test_a_dead_rank_or_one_that_is_not_heard_of_means_that_something_else_is_under_way():
    assert find(WAITS, OVERDUE, {"state": State.DEAD}) == []
    assert (
        list_hung(an_epoch(2), [(a_report(1, epoch=1, workers=(a_worker(**OVERDUE),)), 0.1)], 1)
        == ()
    )


def test_only_a_running_epoch_cuts_ranks_out():
    assert find(WAITS, OVERDUE, stage=Stage.HOLD) == []


def test_a_rank_that_is_stopped_for_long_is_cut_out_however_often_others_were() -> None:
    stopped = {"overdue": 2.0, "stopped": True}
    assert find(WAITS, stopped, factor=16) == []
    assert find(WAITS, stopped | {"stopped_long": True}, factor=16) == [1]


def test_a_rank_stays_named_until_it_makes_progress_or_has_ended() -> None:
    """The limits double once it is named, and its agent may hear of it only later."""
    named = (Hung(slot=1, local=0, life=1),)

    def keep(**changes: object) -> tuple[Hung, ...]:
        return keep_named((), named, [a_report(1, epoch=1, workers=(a_worker(**changes),))])

    assert keep(**OVERDUE) == named
    assert keep(overdue=0.2) == ()
    assert keep(**OVERDUE, life=2) == ()
    assert keep(**OVERDUE, state=State.DEAD) == ()
    assert list_new(named, ()) == list(named)
    assert list_new((replace(named[0], missed="sum 3"),), named) == []


def test_each_cut_doubles_the_limits_until_a_good_while_has_passed():
    patience = Patience().after_cut(100.0).after_cut(200.0)
    assert [patience.factor(now) for now in (201.0, 150.0 + CALM_SECONDS)] == [4, 2]
    assert patience.factor(201.0 + CALM_SECONDS) == 1
    assert find(WAITS, OVERDUE, factor=2) == []
    assert patience.after_cut(201.0 + CALM_SECONDS).cut_at == (201.0 + CALM_SECONDS,)
