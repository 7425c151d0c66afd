"""How long a coordinator stays after the job's end, so that all can read about it."""

import asyncio
from typing import Any, cast

from agent.a_term import a_term
from agent.given import a_report, wanting
from everstep_agent.agent_state import AgentState
from everstep_agent.role import Role
from everstep_contract import report


async def test_a_coordinator_that_was_stopped_once_still_waits_for_those_who_report() -> None:
    """Its clock does not count the time in which its process was stopped."""
    term = a_term(wanting(2))
    term.clock._left_out = 60.0
    term.take(a_report(1))
    role = Role(term.context, AgentState(), cast(Any, None))
    term.end(report.Cause.USER_ERROR, "the script failed")
    term.serve_seen()  # the operator knows
    lingering = asyncio.create_task(role._until_read(term))
    await asyncio.sleep(0.2)
    assert not lingering.done(), "slot 1 has not read about the end"
    await term.board.wait_newer(0, "host-1:7070")
    await asyncio.wait_for(lingering, 30)
    await term.close()
