"""Finds the coordinator, reports to it, reads its levels, and takes the role when it is this
agent's turn.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from everstep_agent import logline
from everstep_agent.identity import Identity
from everstep_agent.pace import Pace
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.client import PeerClient, PeerError
from everstep_agent.peers.following import (
    Answer,
    Choice,
    Holder,
    choose_coordinator,
    choose_witness,
    find_unreached,
)
from everstep_agent.peers.messages import Accepted, After, Asking, Levels, Who
from everstep_contract import codec, levels

WHO_SECONDS = 1.5
"""Limit for a peer to answer whom it follows. After it the peer counts as unreachable, and the
choice is made without it.
"""
URGENT_WHO_SECONDS = 0.4
"""The same while a local rank has waited for others for long."""
LOST_WHO_SECONDS = 0.1
"""The same for a coordinator that this agent has just lost."""
REPORT_SECONDS = 3.0
"""Limit for the coordinator to accept a report. After it the coordinator counts as lost, and the
agent looks for another.
"""
URGENT_SECONDS = 0.7
"""The same while a local rank has waited for others for long: the coordinator's node may be lost."""
LOOK_SECONDS = 0.1
"""Pause between two looks at how urgent an answer is."""
LEVELS_SECONDS = 6.0
"""Limit for the coordinator's levels, which it holds for `LONG_POLL_SECONDS` at most. After it the
coordinator counts as lost, and the agent looks for another.
"""
HEARTBEAT_SECONDS = 0.25
"""Pause between two reports if this pod has no news."""
QUIET_HEARTBEAT_SECONDS = 1.0
"""The same while there is no news in the whole job."""
SEARCH_SECONDS = 0.2
"""Pause between two searches for a coordinator."""
URGENT_SEARCH_SECONDS = 0.05
"""The same while a local rank has waited for others for long."""


class Here(Protocol):
    """What the follower needs from its agent."""

    me: Identity
    changed: asyncio.Event
    lost: set[str]

    @property
    def waits_long(self) -> bool: ...
    @property
    def informed(self) -> bool: ...
    @property
    def known_epoch(self) -> int: ...
    def who(self) -> Who: ...
    def peers(self) -> dict[str, levels.SlotAttempt]: ...
    def report(self) -> AgentReport: ...
    def hear(self, published: Levels) -> None: ...
    def follow(self, holder: Holder | None) -> None: ...
    def note_unreached(self, address: str) -> None: ...


Act = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Runs the coordinator's role here until it is given up; its argument is `has_rival`."""


class Follower:
    def __init__(self, here: Here, token: str, act: Act, line: logline.Log) -> None:
        self._here = here
        self._token = token
        self._act = act
        self._line = line
        self._asking: dict[str, PeerClient] = {}
        self._pace = Pace(HEARTBEAT_SECONDS, QUIET_HEARTBEAT_SECONDS)
        self._strangers: set[str] = set()
        """Addresses at which a process answers that does not have the job's token."""

    async def run(self) -> None:
        alone_since = time.monotonic()
        said = ""
        while True:
            if (
                not self._here.informed
            ):  # an agent that has not received `wanted` does not take the role
                alone_since = time.monotonic()
                await asyncio.sleep(SEARCH_SECONDS)
                continue
            answers = await self._ask_all()
            choice = self._choose(answers, time.monotonic() - alone_since)
            if choice.reason != said:
                said = choice.reason
                self._line.say("coordinator_choice", address=choice.address, reason=said)
            if choice.act:
                if await self._caught_up(answers):
                    await self._act(self._has_rival)
                    alone_since = time.monotonic()
            elif choice.address and await self._follow(choice.address):
                alone_since = time.monotonic()
            urgent = self._here.waits_long
            await asyncio.sleep(URGENT_SEARCH_SECONDS if urgent else SEARCH_SECONDS)

    async def close(self) -> None:
        """Close the search's connections: an agent that follows a coordinator needs none to the
        other peers.
        """
        for client in self._asking.values():
            await client.close()

    def _choose(self, answers: Mapping[str, Answer], alone: float) -> Choice:
        return choose_coordinator(self._here.who(), self._here.me.address, answers, alone_for=alone)

    async def _has_rival(self) -> bool:
        """Whether another active coordinator precedes this one: two took the role at once."""
        return not self._choose(await self._ask_all(), 0.0).act

    async def _caught_up(self, answers: Mapping[str, Answer]) -> bool:
        """Read the newest epoch from one of its members before taking the role: the members' state
        may be the only copy. Returns whether this agent knows the newest epoch now.
        """
        who = choose_witness(answers, known=self._here.known_epoch)
        if who is None:
            return True
        try:
            self._here.hear(
                await self._asking[who].call("/v1/heard", After(), Levels, timeout=WHO_SECONDS)
            )
        except PeerError as error:
            self._line.say("not_caught_up", address=who, message=str(error))
            return False
        return True

    async def _ask_all(self) -> dict[str, Answer]:
        peers = {a: s for a, s in self._here.peers().items() if a != self._here.me.address}
        for gone in set(self._asking) - set(peers):
            await self._asking.pop(gone).close()
        self._here.lost &= peers.keys()
        limit = URGENT_WHO_SECONDS if self._here.waits_long else WHO_SECONDS
        found = await asyncio.gather(*(self._ask(a, s, limit) for a, s in peers.items()))
        self._here.note_unreached(find_unreached(self._here.me.address, found))
        return {answer.address: answer for answer in found}

    async def _ask(self, address: str, place: levels.SlotAttempt, limit: float) -> Answer:
        client = self._asking.setdefault(address, PeerClient(address, self._token))
        who = None
        try:
            lost = limit < WHO_SECONDS and address in self._here.lost
            seconds = LOST_WHO_SECONDS if lost else limit
            who = await client.call(
                "/v1/who", Asking(lost=tuple(sorted(self._here.lost))), Who, timeout=seconds
            )
            self._strangers.discard(address)
            self._here.lost.discard(address)
        except PeerError as error:
            if error.stranger and address not in self._strangers:
                self._strangers.add(address)
                self._line.say("answer_not_proven", address=address, message=str(error))
        return Answer(slot=place.slot, attempt=place.attempt, address=address, who=who)

    async def _follow(self, address: str) -> bool:
        """Follow the coordinator until it is lost or gives up the role. Returns whether it ever
        accepted a report.
        """
        heard = False
        async with (
            PeerClient(address, self._token) as reporting,
            PeerClient(address, self._token) as hearing,
        ):
            try:
                first = await reporting.call(
                    "/v1/report", self._here.report(), Accepted, timeout=REPORT_SECONDS
                )
                heard = first.acting
                if heard:
                    await self.close()
                    self._here.follow(Holder(address=address, term=first.term))
                    await self._exchange(reporting, hearing, first.term)
            except PeerError as error:
                if not error.refused:
                    self._here.lost.add(address)
                self._line.say("coordinator_lost", address=address, message=str(error))
            finally:
                self._here.follow(None)
        return heard

    async def _exchange(self, reporting: PeerClient, hearing: PeerClient, term: str) -> None:
        """Report and read levels until one of the two fails. Raises `PeerError`."""
        tasks = [
            asyncio.create_task(self._keep_reporting(reporting, term)),
            asyncio.create_task(self._keep_reading(hearing)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_reporting(self, client: PeerClient, term: str) -> None:
        while True:
            self._here.changed.clear()
            answer = await self._report(client)
            if not answer.acting:
                raise PeerError(f"{client.address} no longer coordinates", refused=True)
            if answer.term != term:
                raise PeerError(
                    f"{client.address} has started a new term as coordinator", refused=True
                )
            await self._pace.wait_for_news(self._here.changed)

    async def _report(self, client: PeerClient) -> Accepted:
        """Raises `PeerError` when the coordinator counts as lost."""
        began = time.monotonic()
        call = asyncio.create_task(
            client.call("/v1/report", self._here.report(), Accepted, timeout=REPORT_SECONDS)
        )
        try:
            while not (await asyncio.wait([call], timeout=LOOK_SECONDS))[0]:
                spent = time.monotonic() - began
                if spent > URGENT_SECONDS and self._here.waits_long:
                    text = f"no answer within {spent:.1f} s, while a rank waits for others"
                    raise PeerError(f"{client.address}/v1/report: {text}")
            return call.result()
        finally:
            call.cancel()

    async def _keep_reading(self, client: PeerClient) -> None:
        version, reader = 0, codec.Reader(Levels)
        while True:
            published = await client.call(
                "/v1/levels",
                After(version=version, reader=self._here.me.address),
                reader,
                timeout=LEVELS_SECONDS,
            )
            if published.version != version:
                version = published.version
                self._pace.note_news()
            self._here.hear(published)
