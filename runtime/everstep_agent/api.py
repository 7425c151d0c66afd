"""The agent's HTTP API. Bodies are documents of `messages` and `levels`."""

import asyncio
import contextlib
from dataclasses import replace

from everstep_agent.agent_state import AgentState
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator.term import Term
from everstep_agent.own_agent import OwnAgent
from everstep_agent.peers import http, peer_tier
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.incoming import Incoming
from everstep_agent.peers.messages import Accepted, After, Asking, LedgerCall, StoreCall
from everstep_agent.pod import fetch_ledger
from everstep_agent.pod.relay import answer_call
from everstep_contract import codec, levels, names

RELAY_SECONDS = 1.5
"""Limit for the coordinator to answer a forwarded request of the operator. After that, this agent
answers with its newest copy.
"""


class Api:
    def __init__(self, run: str, state: AgentState, own: OwnAgent, pool: Pool) -> None:
        self._run = run
        self._state = state
        self._own = own
        self._pool = pool

    def routes(self) -> dict[str, http.Handler]:
        return {
            names.WANTED_PATH: self._wanted,
            "/v1/relayed-wanted": self._relayed_wanted,
            "/v1/who": self._post_who,
            "/v1/heard": self._heard,
            "/v1/report": self._report,
            "/v1/levels": self._levels,
            "/v1/part": self._part,
            "/v1/store": self._store,
            fetch_ledger.PATH: self._ledger,
            **peer_tier.build_routes(Incoming(self._own.memory, self._own.disk)),
        }

    async def _wanted(self, body: bytes) -> bytes:
        """The operator sends `Wanted` to any agent."""
        wanted = codec.loads(levels.Wanted, body)
        self._own.want(wanted)
        return codec.dumps(await self._seen(wanted))

    async def _relayed_wanted(self, body: bytes) -> bytes:
        """Forwarded by an agent that follows this one; never forwarded again."""
        self._own.want(codec.loads(levels.Wanted, body))
        return codec.dumps(self._own_seen())

    async def _seen(self, wanted: levels.Wanted) -> levels.Seen:
        target = self._state.following
        if self._state.coordinator is None and target is not None:
            with contextlib.suppress(PeerError):
                return await self._pool.call(
                    target.address, "/v1/relayed-wanted", wanted, levels.Seen, timeout=RELAY_SECONDS
                )
        return self._own_seen()

    def _own_seen(self) -> levels.Seen:
        state = self._state
        if state.coordinator is not None:
            return state.coordinator.term.serve_seen()
        if state.published is not None:
            return state.read_seen()
        return levels.Seen(run=self._run)

    async def _post_who(self, body: bytes) -> bytes:
        self._own.note_lost(codec.loads(Asking, body).lost)
        return codec.dumps(self._own.who())

    async def _heard(self, body: bytes) -> bytes:
        """The newest levels of a lost coordinator, for the agent that is about to take the role."""
        state = self._state
        if state.published is None:
            raise codec.DecodeError("this agent has not followed a coordinator yet")
        return codec.dumps(replace(state.published, seen=state.read_seen()))

    async def _report(self, body: bytes) -> bytes:
        found = codec.loads(AgentReport, body)
        coordinator = self._state.coordinator
        if coordinator is not None:
            coordinator.term.take(found)
        return codec.dumps(self._accept())

    async def _levels(self, body: bytes) -> bytes:
        after = codec.loads(After, body)
        return await self._term().board.serve(after.version, after.reader)

    async def _part(self, body: bytes) -> bytes:
        part = await asyncio.to_thread(codec.loads, Part, body)
        coordinator = self._state.coordinator
        taken = coordinator is not None and coordinator.term.add_part(part)
        return codec.dumps(self._accept() if taken else Accepted(acting=False, term=""))

    def _accept(self) -> Accepted:
        coordinator = self._state.coordinator
        return Accepted(
            acting=coordinator is not None, term=coordinator.term.id if coordinator else ""
        )

    async def _store(self, body: bytes) -> bytes:
        return codec.dumps(await answer_call(self._own.group, codec.loads(StoreCall, body)))

    async def _ledger(self, body: bytes) -> bytes:
        """The part of the ledger that no manifest covers yet, for a pod that joins the running
        epoch.
        """
        call = codec.loads(LedgerCall, body)
        return codec.dumps(fetch_ledger.answer_call(self._own.book, call))

    def _term(self) -> Term:
        if self._state.coordinator is None:
            raise codec.DecodeError("this agent does not coordinate; ask /v1/who")
        return self._state.coordinator.term
