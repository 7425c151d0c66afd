"""What an agent knows of the job at this moment, shared by its parts."""

import time
from dataclasses import dataclass, field

from everstep_agent import rounds
from everstep_agent.coordinator import Coordinator
from everstep_agent.desk import Identity
from everstep_agent.messages import Levels
from everstep_contract import levels

OLD_SECONDS = 10.0
"""A lower revision than ours counts when ours was not repeated for so long: another operator has
started.
"""


@dataclass(slots=True)
class Standing:
    wanted: levels.Wanted = field(default_factory=levels.Wanted)
    wanted_at: float = 0.0
    published: Levels | None = None
    """The newest levels of the coordinator that we follow, or of our own."""
    coordinator: Coordinator | None = None
    """Not None: the role is ours."""

    @property
    def informed(self) -> bool:
        return self.wanted_at > 0 or self.published is not None

    def take_wanted(self, found: levels.Wanted) -> bool:
        """From the operator. Whether it is news."""
        now = time.monotonic()
        if found.revision < self.wanted.revision and now - self.wanted_at < OLD_SECONDS:
            return False
        self.wanted, self.wanted_at = found, now
        return True

    def take_published(self, found: Levels) -> None:
        self.published = found
        if found.wanted.revision >= self.wanted.revision:
            self.wanted = found.wanted

    @property
    def epoch(self) -> int:
        """Number of the newest epoch that we have heard of."""
        level = self.published.epoch if self.published else None
        return level.number if level else 0

    def may_coordinate(self, me: Identity) -> bool:
        gone = rounds.is_gone(me.slot, me.attempt, self.wanted)
        return me.slot not in self.wanted.leave and not gone

    def peers(self) -> dict[str, levels.SlotAttempt]:
        """By address: the operator's list, and whoever is in the newest epoch."""
        found = {
            p.address: levels.SlotAttempt(slot=p.slot, attempt=p.attempt) for p in self.wanted.peers
        }
        epoch = self.published.epoch if self.published else None
        for m in epoch.members if epoch else ():
            found.setdefault(m.address, levels.SlotAttempt(slot=m.slot, attempt=m.attempt))
        return found
