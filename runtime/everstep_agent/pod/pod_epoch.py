"""Where a pod is in the sequence of epochs: the newest levels that it has heard, the epoch that it has joined, and
the one that its workers are in.
"""

from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod.arming import Arming
from everstep_agent.pod.leaving import Leaving
from everstep_contract import levels


class PodEpoch:
    def __init__(self) -> None:
        self.newest: Levels | None = None
        self.cut_heard = 0
        """Number of the last epoch that a coordinator has cut or ended, as far as heard."""
        self.joined, self.joined_token = 0, ""
        self.number = 0
        """The epoch that the local workers are in, or were in last; 0: none yet."""
        self.level: EpochLevel | None = None
        """That epoch's level, as last heard."""
        self.arming, self.leaving = Arming(), Leaving()

    def hear(self, published: Levels) -> bool:
        """Keep these levels. Returns whether they are of another version than the last ones."""
        new = self.newest is None or published.version != self.newest.version
        self.newest, level = published, published.epoch
        if level is not None and level.stage in (Stage.CUT, Stage.OVER):
            self.cut_heard = max(self.cut_heard, level.number)
        return new

    def join(self, number: int, token: str = "") -> None:
        self.joined, self.joined_token = number, token

    def enter(self, level: EpochLevel) -> None:
        """The local workers are in this epoch from now on."""
        self.number, self.level = level.number, level
        self.arming, self.leaving = Arming(), Leaving()

    @property
    def holds(self) -> bool:
        """Whether the workers' epoch holds its step until its ranks regroup."""
        return self.level is not None and self.level.stage is Stage.HOLD

    @property
    def newest_level(self) -> EpochLevel | None:
        return self.newest.epoch if self.newest is not None else None

    @property
    def run_known(self) -> bool:
        """Whether a coordinator that has read the run log has told this pod how far the run is."""
        return self.newest is not None and self.newest.seen.run != ""

    @property
    def trained(self) -> bool:
        """Whether this job has applied a step, so its script and template work. A former job may have trained the same
        run with another script.
        """
        seen = self.newest.seen if self.newest is not None else levels.Seen()
        return seen.epoch > 0 and seen.step > 0
