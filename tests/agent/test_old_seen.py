"""What an agent tells the operator while no coordinator answers: the last report, and how old it is by now."""

from types import SimpleNamespace
from typing import Any

import pytest

from agent.given import an_epoch
from everstep_agent.agent_state import AgentState
from everstep_agent.api import Api
from everstep_agent.peers.messages import After, Levels
from everstep_contract import codec, levels


@pytest.fixture
def state() -> AgentState:
    """It received the last levels a minute ago."""
    made = AgentState()
    made.take_published(
        Levels(
            coordinator=levels.SlotAttempt(slot=0, attempt=0),
            address="host-0:7070",
            epoch=an_epoch(),
            seen=levels.Seen(run="ns/job", epoch=1, age_ms=250),
        )
    )
    made.published_at -= 60.0
    return made


def ask(state: AgentState) -> Api:
    own: Any = SimpleNamespace(want=state.take_wanted)
    pool: Any = None
    return Api("ns/job", state, own, pool)


async def test_the_operator_learns_how_old_the_report_is(state: AgentState) -> None:
    """Else it would take this report for a younger one than that of a coordinator whose member is silent."""
    seen = codec.loads(levels.Seen, await ask(state)._wanted(codec.dumps(levels.Wanted())))
    assert (seen.epoch, round(seen.age_ms / 1000)) == (1, 60)


async def test_so_does_the_agent_that_takes_the_role(state: AgentState) -> None:
    heard = codec.loads(Levels, await ask(state)._heard(codec.dumps(After())))
    assert round(heard.seen.age_ms / 1000) == 60
    assert heard.epoch == an_epoch()
