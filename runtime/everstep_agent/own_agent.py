"""What the parts of an agent share: its report, the newest levels, its identity."""

import math
import time
from collections.abc import Collection

from everstep_agent.agent_state import AgentState
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.following import Holder
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.peers.messages import Levels, Who
from everstep_agent.pod.pod import Pod
from everstep_contract import levels

TOLD_SECONDS = 3.0
"""How long a peer's word counts that it has lost this agent's coordinator."""


class OwnAgent:
    def __init__(self, me: Identity, state: AgentState, pod: Pod) -> None:
        self.me = me
        self.group = GroupStore()
        """Keys of the process group of an epoch that this agent started; kept even after another
        agent has taken the role.
        """
        self.changed = pod.news.to_report
        """Set whenever there is something new to report."""
        self.lost: set[str] = set()
        """Addresses of coordinators with which this agent has lost contact, and which have not
        answered since.
        """
        self._doubted_at = -math.inf
        """When a peer last said that it has lost the coordinator that this agent follows."""
        self._state = state
        self._pod = pod

    def report(self) -> AgentReport:
        return self._pod.build_report(time.monotonic())

    def hear(self, published: Levels) -> None:
        """Apply the levels of the coordinator that this agent follows, or of its own."""
        self._state.take_published(published)
        store = published.epoch.store if published.epoch else ""
        keeper = store or published.address
        self._pod.relay.target = self.group if keeper == self.me.address else keeper
        self._pod.apply(published)

    def want(self, wanted: levels.Wanted) -> None:
        """Apply the operator's document."""
        if not self._state.take_wanted(wanted):
            return
        if self._state.coordinator is not None:
            self._state.coordinator.term.want(wanted)
        elif self._state.published is not None:
            self._pod.apply(self._state.rebuild_published())

    def who(self) -> Who:
        coordinator = self._state.coordinator
        return Who(
            slot=self.me.slot,
            attempt=self.me.attempt,
            acting=coordinator is not None and not coordinator.term.ended,
            epoch=self._pod.epoch.number,
            coordinator=self._state.following.address if self._state.following else "",
            candidate=not self._pod.holds.leaving and self._state.may_coordinate(self.me),
        )

    @property
    def book(self) -> Book:
        """The part of the ledger that no manifest covers yet."""
        return self._pod.book

    @property
    def memory(self) -> MemoryTier:
        return self._pod.memory

    @property
    def disk(self) -> FolderTier | None:
        return self._pod.disk

    def follow(self, holder: Holder | None) -> None:
        """As in `AgentState`. Called after each report, also if the answer to it was lost."""
        self._state.following, self._state.followed = holder, True
        if holder is not None:
            self._state.note_unreached("")

    def note_unreached(self, address: str) -> None:
        """As in `AgentState`."""
        self._state.note_unreached(address)

    def peers(self) -> dict[str, levels.SlotAttempt]:
        return self._state.peers()

    def note_lost(self, addresses: Collection[str]) -> None:
        """A peer has lost these coordinators."""
        if self._state.following is not None and self._state.following.address in addresses:
            self._doubted_at = time.monotonic()

    @property
    def waits_long(self) -> bool:
        """Whether a local rank has waited for other ranks for a long time, or has left its group, or a
        peer has just lost this agent's coordinator: a member may be lost. A rank that waits for one of its own
        unit seems to compute, so only its peers can tell.
        """
        if time.monotonic() - self._doubted_at < TOLD_SECONDS:
            return True
        return any(w.waits_long or w.state is State.HELD for w in self.report().workers)

    @property
    def informed(self) -> bool:
        """Whether this agent has received `wanted`. Without it, an agent does not take the role."""
        return self._state.informed

    @property
    def known_epoch(self) -> int:
        """Number of the newest known epoch."""
        return self._state.epoch
