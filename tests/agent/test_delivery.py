"""Delivery of parts to the coordinator, in this agent or in another one."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from everstep_agent import delivery as delivery_module
from everstep_agent import logline
from everstep_agent.agent_state import AgentState
from everstep_agent.checkpoint.parts import Part, PartKey
from everstep_agent.delivery import Delivery
from everstep_agent.peers import http
from everstep_agent.peers.client import Pool
from everstep_agent.peers.following import Holder
from everstep_agent.peers.messages import Accepted
from everstep_contract import codec

TOKEN = "token"
SHARE = Part(epoch=1, step=28, rank=1)
WHOLE = replace(SHARE, whole=True, lead=True)
Parts = dict[PartKey, Part]


@dataclass
class Term:
    """Takes parts, as a coordinator's term does."""

    id: str
    taken: list[Part] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    knows: bool = True
    """Whether it knows the epoch of the parts."""

    @property
    def term(self) -> "Term":
        return self

    def add_part(self, part: Part) -> bool:
        self.taken.append(part)
        self.came.set()
        return self.knows

    async def got(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.taken) < count:
                self.came.clear()
                await self.came.wait()


@asynccontextmanager
async def delivering(state: AgentState, parts: Parts) -> AsyncIterator[Delivery]:
    pool = Pool(TOKEN)
    log = logline.Log(io.StringIO())
    delivery = Delivery(state=state, pool=pool, parts=lambda: parts, line=log)
    running = asyncio.create_task(delivery.run())
    try:
        yield delivery
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pool.close()


@asynccontextmanager
async def an_agent(term: Term, *, answers: bool = True) -> AsyncIterator[str]:
    """Start an agent that acts as coordinator; yield its address."""

    async def take(body: bytes) -> bytes:
        term.add_part(codec.loads(Part, body))
        if not answers:
            await asyncio.Event().wait()
        return codec.dumps(Accepted(acting=True, term=term.id))

    server = http.Server(TOKEN, {"/v1/part": take})
    await server.open("127.0.0.1", 0)
    try:
        yield server.address
    finally:
        await server.close()


async def test_a_save_of_the_whole_follows_the_share_of_the_same_step_and_nothing_comes_twice() -> (
    None
):
    parts: Parts = {SHARE.key: SHARE}
    coordinator: Any = Term("1")
    state = AgentState(coordinator=coordinator)
    async with delivering(state, parts) as delivery:
        for number, part in ((1, SHARE), (2, WHOLE), (3, replace(SHARE, step=32))):
            parts[part.key] = part
            for _ in range(2):
                delivery.wake(part)
                await coordinator.got(number)
    assert coordinator.taken == [SHARE, WHOLE, replace(SHARE, step=32)]


async def test_whoever_takes_the_role_twice_gets_the_parts_twice() -> None:
    """Each term starts without parts, even if the same agent takes the role again."""
    first, second, third = Term("1"), Term("2"), Term("3")
    state: Any = AgentState(coordinator=None)
    async with delivering(state, {WHOLE.key: WHOLE}):
        state.coordinator = first
        await first.got(1)
        state.coordinator = second
        await second.got(1)
        state.coordinator = None
        async with an_agent(third) as address:
            state.following = Holder(address=address, term="3")
            await third.got(1)
            third.id = "4"
            state.following = Holder(address=address, term="4")
            await third.got(2)
    assert first.taken == second.taken == [WHOLE]


async def test_a_coordinator_that_does_not_know_the_epoch_yet_gets_the_part_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery_module, "AGAIN_SECONDS", 0.05)
    coordinator: Any = Term("1", knows=False)
    async with delivering(AgentState(coordinator=coordinator), {WHOLE.key: WHOLE}):
        await coordinator.got(2)
        coordinator.knows = True
        taken = len(coordinator.taken)
        await coordinator.got(taken + 1)
        await asyncio.sleep(0.2)
    assert len(coordinator.taken) <= taken + 2, "and once it has taken the part, no more"


async def test_a_coordinator_that_stands_still_is_not_waited_for_once_another_has_the_role() -> (
    None
):
    frozen, heir = Term("1"), Term("2")
    state = AgentState()
    async with (
        an_agent(frozen, answers=False) as old,
        an_agent(heir) as new,
        delivering(state, {WHOLE.key: WHOLE}),
    ):
        state.following = Holder(address=old, term="1")
        await frozen.got(1)
        state.following = Holder(address=new, term="2")
        await heir.got(1)


async def test_a_part_that_another_term_took_is_sent_again() -> None:
    """The role has moved to a newer term, and this agent does not know it yet."""
    term = Term("newer")
    state = AgentState()
    async with an_agent(term) as address, delivering(state, {WHOLE.key: WHOLE}):
        state.following = Holder(address=address, term="older")
        await term.got(2)
        state.following = Holder(address=address, term="newer")
        await term.got(3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.5):  # a part is retried every second
                await term.got(4)
    assert len(term.taken) == 3
