"""An agent that cannot reach the coordinator which the others follow."""

from types import SimpleNamespace
from typing import Any

import pytest

from agent.given import a_report
from everstep_agent import agent
from everstep_agent.agent_state import AgentState
from everstep_agent.own_agent import OwnAgent

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


def end_of(state: AgentState, workers: dict[int, Any], *, over: bool = True) -> str:
    """How an agent of this state ends; empty: it does not."""
    pod = SimpleNamespace(workers=SimpleNamespace(current=workers, group_over=lambda: over))
    here: Any = SimpleNamespace(_state=state, me=SimpleNamespace(address=ME), pod=pod)
    found = agent.Agent._find_cut_off(here)
    return found.message if found is not None else ""


def test_an_agent_that_the_others_may_wait_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers were in an epoch, or a coordinator has heard of them and may have claimed one with them."""
    monkeypatch.setattr(agent, "CUT_OFF_SECONDS", 0.0)
    heard = cut_off()
    own: Any = SimpleNamespace(_state=heard)
    OwnAgent.follow(own, None)
    assert "so that the others can continue without it" in end_of(heard, {})
    assert "so that the others can continue without it" in end_of(cut_off(), {0: object()})
    assert end_of(cut_off(), {0: object()}, over=False) == ""


def test_an_agent_that_has_not_joined_yet_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end proves nothing to anyone, and while its container waits for its next start, it cannot join."""
    monkeypatch.setattr(agent, "CUT_OFF_SECONDS", 0.0)
    assert end_of(cut_off(), {}) == ""
    monkeypatch.setattr(agent, "UNJOINED_SECONDS", 0.0)
    assert "host-0:7070" in end_of(cut_off(), {})
    assert "has not joined the job yet" in end_of(cut_off(), {})
