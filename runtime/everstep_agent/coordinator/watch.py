"""What the training loop keeps between two turns of a running epoch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.near_saves import NearSaves
from everstep_agent.peers.epoch_level import EpochMember


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A planned end of the epoch, recorded when its boundary was armed."""

    cause: Cause
    id: str
    """Empty: choose an id as for any incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """Times of an invited newcomer."""

    at: float
    late_at: float
    """From when on it is late if it is not ready to join."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """The state that the training loop keeps between two turns."""

    began: float
    """When the epoch began, or was continued in place."""
    save_at: float
    """When the last save at an armed boundary was done, or given up."""
    dropped_at: int | None = None
    """The newest committed step when a change of membership dropped a save. Another is made soon, unless
    one was committed since. None: none was dropped since the last save.
    """
    dropped_since: float = 0.0
    """When the first save was dropped since that commit."""
    first_dropped: int = -1
    """The newest committed step then; -1: none was dropped yet."""
    saved: int = 0
    """The step of the last save at an armed boundary of this epoch."""
    moved_at: float
    """When any rank's step last advanced."""
    armed_at: float = 0.0
    """When the present boundary was armed."""
    ready_at: float | None = None
    """Since when a pod has been ready to join; None: no pod is."""
    coming: dict[int, float] = field(default_factory=dict)
    """Slots whose pods are alive and not ready yet → since when."""
    invited: dict[EpochMember, Invited] = field(default_factory=dict)
    prepared_at: float | None = None
    """Since when some of them have been ready to join; None: none is."""
    took: float = 0.0
    """How long the last newcomer that was ready first had taken."""
    furthest: int = -1
    raises: int = 0
    purpose: str = ""
    """Why the armed boundary ends the epoch (`boundaries.why_stay`); empty: it only saves."""
    move: Move | None = None
    """The planned end, as long as it is not opened as an incident."""
    leave_at: int | None = None
    """The furthest worker's step when members were asked to leave in place; None: none is asked."""
    leave_since: float = 0.0
    """When they were asked."""
    leave_saved_at: float | None = None
    """When a save was last armed for them; None: none was."""
    may_leave_at: float | None = None
    """Since when these members may leave: their state is committed, or the time for its commit is over;
    None: they may not yet."""
    short_since: float | None = None
    """Since when the job has had fewer pods than its minimum; None: it has enough."""
    pin_at: float | None = None
    """From when on a save may be made for a pin; None: no pin is due."""
    near: NearSaves

    @classmethod
    def start(cls, now: float) -> "Watch":
        near = NearSaves(made_at=now)
        return cls(began=now, save_at=now, moved_at=now, armed_at=now, near=near)

    def renew(self, now: float) -> "Watch":
        """The watch for an epoch that continues in place: keeps what spans several such epochs."""
        return replace(
            Watch.start(now),
            save_at=self.save_at,
            dropped_at=self.dropped_at,
            dropped_since=self.dropped_since,
            first_dropped=self.first_dropped,
            short_since=self.short_since,
            coming=self.coming,
            took=self.took,
            pin_at=self.pin_at,
            near=self.near.renew(),
        )

    def note_dropped(self, committed: int, now: float) -> None:
        """Note that a change of membership has dropped a save. `committed`: the newest committed step."""
        if committed != self.first_dropped:
            self.first_dropped, self.dropped_since = committed, now
        self.dropped_at = committed

    def short(self, is_short: bool, now: float) -> float:
        """Seconds since the job has had fewer pods than its minimum."""
        if not is_short:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now
        return 0.0 if self.short_since is None else now - self.short_since

    def note_invited(self, joining: Sequence[EpochMember], now: float, least: float) -> None:
        """Note who is invited. A newcomer is late after twice as long as the last one took, and not
        before `least` seconds.
        """
        new = Invited(at=now, late_at=now + max(least, 2 * self.took))
        self.invited = {m: self.invited.get(m, new) for m in joining}

    def note_prepared(self, prepared: Sequence[EpochMember], now: float) -> None:
        """Note which of those that are invited are ready to join."""
        if not prepared:
            self.prepared_at = None
        elif self.prepared_at is None:
            since = [self.invited[m].at for m in prepared if m in self.invited]
            self.prepared_at, self.took = now, now - min(since, default=now)

    def list_late(self, prepared: Sequence[EpochMember], now: float) -> list[EpochMember]:
        """Those that are invited and late."""
        return [m for m, i in self.invited.items() if m not in prepared and now >= i.late_at]

    def idle(self, furthest: int, now: float) -> float:
        """Seconds since any rank's step last advanced."""
        if furthest != self.furthest:
            self.furthest, self.moved_at = furthest, now
        return now - self.moved_at
