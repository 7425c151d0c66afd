"""When a lost rank's next worker starts."""

import pytest

from agent.given import an_epoch
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod import head_start
from everstep_contract import levels

LOST_AT = 100.0


def publish(*incidents: levels.RuntimeIncident, epoch: EpochLevel | None) -> Levels:
    return Levels(
        coordinator=levels.SlotAttempt(slot=0, attempt=0),
        address="host-0:7070",
        epoch=epoch,
        seen=levels.Seen(incidents=incidents),
    )


def incident(id: str, *, open: bool) -> levels.RuntimeIncident:
    return levels.RuntimeIncident(id=id, cause="WorkerDied", message="", open=open)


BEFORE = publish(incident("former", open=False), epoch=an_epoch())
START = head_start.begin(BEFORE, LOST_AT)


@pytest.mark.parametrize("stage", [Stage.RUNNING, Stage.HOLD, Stage.STARTING])
def test_the_survivors_end_their_step_first(stage: Stage) -> None:
    ours = incident("ours", open=True)
    published = publish(*BEFORE.seen.incidents, ours, epoch=an_epoch(stage=stage))
    assert head_start.lasts(START, published, LOST_AT + 0.1)
    assert not head_start.lasts(START, published, LOST_AT + head_start.HEAD_START_SECONDS)


def test_it_is_over_with_their_first_step() -> None:
    published = publish(*BEFORE.seen.incidents, incident("ours", open=False), epoch=an_epoch())
    assert not head_start.lasts(START, published, LOST_AT + 0.1)


@pytest.mark.parametrize("epoch", [None, an_epoch(stage=Stage.CUT), an_epoch(stage=Stage.OVER)])
def test_nobody_waits_where_all_restart(epoch: EpochLevel | None) -> None:
    assert not head_start.lasts(START, publish(epoch=epoch), LOST_AT + 0.1)


def test_without_a_loss_there_is_nothing_to_wait_for() -> None:
    assert not head_start.lasts(None, BEFORE, LOST_AT)
    assert head_start.lasts(head_start.begin(None, LOST_AT), publish(epoch=an_epoch()), LOST_AT)
