from dataclasses import replace

import pytest

from agent.given import an_epoch, wanting
from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod.time_ledger import TimeLedger, is_spare
from everstep_contract.levels import Seen, SlotAttempt
from everstep_contract.position import Position


def test_every_second_of_a_rank_that_died_is_charged_once():
    """It starts at 0, writes its page last at 4, dies at 5, is cut at 7; the next epoch starts at 10."""
    ledger = TimeLedger()
    ledger.page(0, 1, Position(seconds={"step": 3.0, "wait": 1.0}))
    ledger.tail(0, 1, 5.0, "detect")
    ledger.rest(0, 5.0)
    ledger.cut(7.0)
    ledger.begin(10.0, restore=1.0, first=False)
    found = ledger.total(10.0, "regroup")
    assert found == {"step": 3.0, "wait": 1.0, "detect": 3.0, "restore": 1.0, "regroup": 2.0}
    assert sum(found.values()) == 10.0


def test_a_rank_that_waits_to_leave_in_order_is_idle():
    ledger = TimeLedger()
    ledger.page(0, 1, Position(seconds={"step": 3.0}))
    ledger.tail(0, 1, 4.0, "idle")
    assert ledger.total(5.0, "idle") == {"step": 3.0, "idle": 1.0}


def test_the_hours_of_a_spare_are_no_ranks_seconds_and_those_around_them_are():
    """It starts at 0, is ready at 20, the job loses a member at 7,200, and it takes the place at 7,201."""
    ledger = TimeLedger()
    ledger.rest(0, 0.0)
    for now in (20.0, 24.0, 7200.0):
        ledger.spare(now, first=True)
    ledger.begin(7201.0, restore=0.0, first=True)
    assert ledger.total(7201.0, "startup") == {"startup": 20.0, "regroup": 1.0}


def test_the_time_of_a_rank_that_still_waits_counts_too():
    """It dies at 5, and is cut at 7; at 100 there is still no room for the job, and its pod ends."""
    ledger = TimeLedger()
    ledger.page(0, 1, Position(seconds={"step": 5.0}))
    ledger.rest(0, 5.0)
    assert ledger.total(6.0, "regroup") == {"step": 5.0, "regroup": 1.0}
    ledger.cut(7.0)
    assert ledger.total(100.0, "regroup") == {"step": 5.0, "detect": 2.0, "regroup": 93.0}


def test_a_spare_that_is_not_needed_adds_nothing():
    ledger = TimeLedger()
    ledger.rest(0, 0.0)
    assert ledger.total(10.0, "startup") == {"startup": 10.0}
    ledger.spare(20.0, first=True)
    assert ledger.total(24.0, "startup") == {"startup": 20.0}


@pytest.mark.parametrize(("wanted", "spare"), [(2, True), (3, False)])
def test_a_pod_that_a_job_below_its_size_has_not_taken_in_yet_is_no_spare(
    wanted: int, spare: bool
) -> None:
    pod, member = SlotAttempt(slot=2, attempt=0), SlotAttempt(slot=1, attempt=0)
    published = Levels(
        coordinator=member,
        address="host-1:7070",
        epoch=an_epoch(2),
        seen=Seen(spares=(pod,)),
        wanted=wanting(wanted),
    )
    assert is_spare(published, pod) is spare
    assert not is_spare(published, member)
    assert not is_spare(replace(published, epoch=an_epoch(2, stage=Stage.CUT)), pod)
