import pytest

from everstep_agent import exit_report
from everstep_agent.peers.messages import Levels
from everstep_contract import levels


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (120, "left; the checkpoint of step 120 is committed"),
        (0, "left; no checkpoint is committed yet"),
    ],
)
def test_a_pod_that_left_says_which_checkpoint_is_committed(step: int, text: str) -> None:
    left = levels.Left(slot=1, attempt=2, epoch=3, step=step)
    told = Levels(
        coordinator=levels.SlotAttempt(slot=0, attempt=0),
        address="h:1",
        seen=levels.Seen(left=(left,)),
    )
    found = exit_report.decide_left(told, slot=1, attempt=2)
    assert found is not None
    assert found.message == text
