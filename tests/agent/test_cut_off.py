"""An agent that cannot reach the coordinator which the others follow."""

from types import SimpleNamespace
from typing import Any

from agent.given import a_report
from everstep_agent.agent_state import AgentState

ME = "host-2:7070"


def cut_off(coordinator: Any = None) -> AgentState:
    state = AgentState(coordinator=coordinator)
    state.note_unreached("host-0:7070")
    return state


def test_it_is_known_for_how_long() -> None:
    state = cut_off()
    assert state.find_unreached(ME, 0.0) == "host-0:7070"
    assert state.find_unreached(ME, 60.0) == ""


def test_the_time_goes_on_with_another_coordinator_and_ends_with_one_that_answers() -> None:
    state = cut_off()
    began = state.unreached
    state.note_unreached("host-1:7070")
    assert began is not None
    assert state.unreached == ("host-1:7070", began[1])
    state.note_unreached("")
    assert state.find_unreached(ME, 0.0) == ""


def test_a_coordinator_that_others_follow_is_not_cut_off() -> None:
    own, other = (a_report(slot, address=f"host-{slot}:7070") for slot in (2, 1))
    alone, followed = (
        SimpleNamespace(term=SimpleNamespace(recent=lambda told=told: told))
        for told in ([own], [own, other])
    )
    assert cut_off(alone).find_unreached(ME, 0.0) == "host-0:7070"
    assert cut_off(followed).find_unreached(ME, 0.0) == ""
