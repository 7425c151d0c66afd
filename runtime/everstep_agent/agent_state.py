"""What an agent currently knows about the job, shared by its parts."""

import time
from dataclasses import dataclass, field, replace

from everstep_agent.coordinator import faults
from everstep_agent.coordinator.coordinator import Coordinator
from everstep_agent.coordinator.incidents import find_phase
from everstep_agent.coordinator.pod_status import read_pod_status
from everstep_agent.identity import Identity
from everstep_agent.peers.following import Holder
from everstep_agent.peers.messages import Levels
from everstep_contract import levels

OLD_SECONDS = 10.0
"""A `wanted` with a lower revision than the known one is accepted if the known one has not been
repeated for this long: then another operator has started.
"""


@dataclass(slots=True)
class AgentState:
    wanted: levels.Wanted = field(default_factory=levels.Wanted)
    wanted_at: float = 0.0
    published: Levels | None = None
    """The newest levels of the coordinator that this agent follows, or of its own."""
    published_at: float = 0.0
    """When this agent received them."""
    phase_since: float | None = None
    """When this agent heard that the present phase of the open incident has begun."""
    coordinator: Coordinator | None = None
    """Not None: this agent holds the role."""
    rest_until: float = 0.0
    """No agent takes the role before this time, because a coordinator has failed."""
    following: Holder | None = None
    """The coordinator that this agent follows; None: there is none, or it is this agent."""
    followed: bool = False
    """A coordinator may have heard of this pod's workers since the agent's start, and may count on them."""
    unreached: tuple[str, float] | None = None
    """The address of the coordinator that other agents follow and that this one cannot reach, and since when it has
    been so; None: there is no such coordinator.
    """

    @property
    def holder(self) -> Holder | None:
        """The agent that holds the role, as far as known."""
        if self.coordinator is not None:
            return Holder(address="", term=self.coordinator.term.id)
        return self.following

    @property
    def informed(self) -> bool:
        return self.wanted_at > 0 or self.published is not None

    def note_unreached(self, address: str) -> None:
        """`address`: as in `unreached`; empty: there is none."""
        since = self.unreached[1] if self.unreached is not None else time.monotonic()
        self.unreached = (address, since) if address else None

    def find_unreached(self, me: str, seconds: float) -> str:
        """The coordinator that this agent has not reached for so long. Empty: there is none, or other agents follow
        this one.
        """
        if self.unreached is None or time.monotonic() - self.unreached[1] < seconds:
            return ""
        heard = self.coordinator.term.recent() if self.coordinator is not None else []
        return "" if any(r.address != me for r in heard) else self.unreached[0]

    def take_wanted(self, found: levels.Wanted) -> bool:
        """Store the operator's document, unless it is outdated. Return whether it was stored."""
        now = time.monotonic()
        if found.revision < self.wanted.revision and now - self.wanted_at < OLD_SECONDS:
            return False
        self.wanted, self.wanted_at = found, now
        return True

    def take_published(self, found: Levels) -> None:
        news = self.published is None or len(found.faults) > len(self.published.faults)
        if found.laid_down and news:
            self.rest_until = time.monotonic() + faults.choose_rest(found.faults)
        before = self.published.seen.incidents if self.published is not None else ()
        if find_phase(found.seen.incidents) != find_phase(before):
            self.phase_since = time.monotonic()
        self.published, self.published_at = found, time.monotonic()
        if found.wanted.revision >= self.wanted.revision:
            self.wanted = found.wanted

    def read_seen(self) -> levels.Seen:
        """The `seen` of the newest levels, as old as it is by now: there may be no coordinator any more."""
        assert self.published is not None
        seen, kept = self.published.seen, time.monotonic() - self.published_at
        return replace(seen, age_ms=seen.age_ms + round(kept * 1000))

    def rebuild_published(self) -> Levels:
        """The coordinator's newest levels, with the operator's newest `wanted` in them."""
        assert self.published is not None
        return replace(self.published, wanted=self.wanted)

    @property
    def epoch(self) -> int:
        """Number of the newest known epoch."""
        level = self.published.epoch if self.published else None
        return level.number if level else 0

    def may_coordinate(self, me: Identity) -> bool:
        gone = read_pod_status(self.wanted).is_gone(me.slot, me.attempt)
        rests = time.monotonic() < self.rest_until
        return me.slot not in self.wanted.leave and not gone and not rests

    def peers(self) -> dict[str, levels.SlotAttempt]:
        """Address → pod: the pods in the operator's list and the members of the newest epoch."""
        found = {
            p.address: levels.SlotAttempt(slot=p.slot, attempt=p.attempt) for p in self.wanted.peers
        }
        epoch = self.published.epoch if self.published else None
        for m in epoch.members if epoch else ():
            found.setdefault(m.address, levels.SlotAttempt(slot=m.slot, attempt=m.attempt))
        return found
