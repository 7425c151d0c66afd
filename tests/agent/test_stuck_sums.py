"""When a sum counts as stuck: every rank waits in it, and nothing moves between them."""

from collections.abc import Iterable

import pytest

from agent.given import a_report, a_worker, an_epoch
from everstep_agent.coordinator.breaks import Break
from everstep_agent.coordinator.stuck import FRESH_SECONDS, find_stuck
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import Boundary, Stage
from everstep_contract.sums import Sums

WAIT = Sums(step=7, reduction=0, buckets=2, joined=3, complete=1)
STILL = {
    "waiting": True, "applied": 6, "still_ms": 1100, "still_limit_ms": 1000, "sums": WAIT,
}  # fmt: skip


def tell(*ranks: dict[str, object], age: float = 0.1) -> list[tuple[AgentReport, float]]:
    workers = (a_worker(**(STILL | r)) for r in ranks)
    return [(a_report(n, epoch=1, workers=(w,)), age) for n, w in enumerate(workers)]


def find(
    reports: Iterable[tuple[AgentReport, float]], factor: float = 1, **changes: object
) -> Break | None:
    return find_stuck(an_epoch(3, **changes), reports, factor)


def test_a_sum_in_which_nothing_moves_for_the_learnt_limit_of_every_rank_is_stuck():
    found = find(tell({}, {"still_ms": 1300, "still_limit_ms": 1200}, {}))
    assert (found.cause, found.certain, found.dead_ms) == ("GroupStuck", False, 1100)
    assert found.message == (
        "all 3 ranks wait in bucket 2 of 2 in reduction 0 of step 7, and nothing has moved between them for 1.1 s; "
        "the limit learnt from their last steps is 1.2 s"
    )


@pytest.mark.parametrize(
    "one",
    [
        {"still_ms": 900},
        {"still_limit_ms": 2000},
        {"still_limit_ms": 0},
        {"still_ms": 0, "still_limit_ms": 0},
        {"waiting": False},
        {"state": State.HELD},
        {"state": State.DEAD},
        {"applied": 0},
    ],
    ids=[
        "something moved lately", "it has learnt a wider limit", "it has learnt none", "it waits in no sum",
        "it computes", "it has left the group", "it died", "its group has completed no step",
    ],
)  # fmt: skip
def test_one_rank_of_which_that_cannot_be_said_keeps_the_group(one: dict[str, object]):
    assert find(tell({}, {}, {})) is not None
    assert find(tell({}, one, {})) is None


def test_a_rank_that_is_not_heard_of_now_may_have_gone_on():
    assert find(tell({}, {})) is None
    assert find([*tell({}, {}), *tell({}, {}, {}, age=FRESH_SECONDS + 0.1)[2:]]) is None


def test_each_wrong_cut_widens_the_limits():
    assert find(tell({}, {}, {}), factor=2) is None
    assert find(tell(*[{"still_ms": 2100}] * 3), factor=2) is not None


def test_only_a_running_epoch_whose_members_may_go_on_in_place_is_cut():
    still = tell({}, {}, {})
    assert find(still, stage=Stage.HOLD) is None
    assert find(still, boundary=Boundary(step=7, stay=True)) is None
    assert find(still, boundary=Boundary(step=9)) is not None
