from everstep_agent.pod.time_ledger import TimeLedger
from everstep_contract.position import Position


def test_every_second_of_a_rank_that_died_is_charged_once():
    """It starts at 0, writes its page last at 4, dies at 5, is cut at 7; the next epoch starts at 10."""
    ledger = TimeLedger()
    ledger.page(0, 1, Position(seconds={"step": 3.0, "wait": 1.0}))
    ledger.tail(0, 1, 5.0, "detect")
    ledger.rest(0, 5.0)
    ledger.cut(7.0)
    ledger.begin(10.0, restore=1.0, first=False)
    found = ledger.total()
    assert found == {"step": 3.0, "wait": 1.0, "detect": 3.0, "restore": 1.0, "regroup": 2.0}
    assert sum(found.values()) == 10.0


def test_a_rank_that_waits_to_leave_in_order_is_idle():
    ledger = TimeLedger()
    ledger.page(0, 1, Position(seconds={"step": 3.0}))
    ledger.tail(0, 1, 4.0, "idle")
    assert ledger.total() == {"step": 3.0, "idle": 1.0}
