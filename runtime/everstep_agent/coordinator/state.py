"""What a coordinator has concluded about the job. Pure: every transition has a name and returns a
new value.

What agents and operator read is derived from it. It is soft state: what must outlive the
coordinator is in the run log, or is reported again by the agents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from everstep_agent.coordinator import stalled_joins
from everstep_agent.coordinator.incidents import Cause, Incidents
from everstep_agent.coordinator.pod_status import read_pod_status
from everstep_agent.peers.epoch_level import (
    Boundary,
    EpochLevel,
    EpochMember,
    Hung,
    Id,
    Saver,
    Stage,
    Transfer,
)
from everstep_agent.peers.messages import CoordinatorFault, End
from everstep_contract import levels, report
from everstep_contract.log import Claim, Commit

NOTES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What ended the newest epoch, and in which step. Claims record it, so that repetitions can be
    counted.
    """

    cause: str = ""
    step: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    wanted: levels.Wanted
    round: int = 0
    """Number of the round being gathered; 0: none."""
    burnt: int = 0
    """Highest number of a round that was given up; such a number is never used again."""
    epoch: EpochLevel | None = None
    unfinished: EpochLevel | None = None
    """A former epoch whose last save is committed before the next one is claimed."""
    refused: str = ""
    """Why the running epoch, which stepped first, cannot be claimed; empty: nothing prevents it."""
    incidents: Incidents = field(default_factory=Incidents)
    failed_joins: Mapping[stalled_joins.Pod, stalled_joins.FailedJoins] = field(
        default_factory=dict
    )
    """Of pods that could not take over the state, and have not joined since."""
    left: tuple[levels.Left, ...] = ()
    strike: Strike = field(default_factory=Strike)
    broken: Mapping[str, str] = field(default_factory=dict)
    """Manifests of checkpoints that could not be restored → why."""
    notes: tuple[str, ...] = ()
    faults: tuple[CoordinatorFault, ...] = ()
    """Faults of the job's coordinators so far (`faults.py`)."""
    stopped: levels.Stopped | None = None
    end: End | None = None

    # --- what the operator wants ------------------------------------------------------------------

    def want(self, wanted: levels.Wanted) -> "JobState":
        return replace(self, wanted=wanted)

    def note_left(self, left: tuple[levels.Left, ...]) -> "JobState":
        return replace(self, left=left)

    # --- from a round to an epoch ----------------------------------------------------------------

    def open_round(self, number: int) -> "JobState":
        return replace(self, round=number)

    def burn_round(self, number: int) -> "JobState":
        return replace(self, burnt=max(number, self.burnt))

    def begin_epoch(self, epoch: EpochLevel) -> "JobState":
        """Begin an epoch that is claimed, or that steps first."""
        failed = stalled_joins.forget_joined(self.failed_joins, epoch.members)
        return replace(self, round=0, epoch=epoch, refused="", failed_joins=failed)

    def note_claimed(self, claim: Claim) -> "JobState":
        """Note that this claim is in the log."""
        epoch = self.epoch
        unclaimed = tuple(c for c in epoch.unclaimed if c != claim) if epoch else ()
        return self._with_epoch(unclaimed=unclaimed)

    def refuse_claim(self, why: str) -> "JobState":
        return replace(self._with_epoch(unclaimed=()), refused=why)

    def finish_save(self, unfinished: EpochLevel | None) -> "JobState":
        return replace(self, unfinished=unfinished)

    def adopt_epoch(self, held: EpochLevel) -> "JobState":
        """Adopt an epoch whose workers are alive although this coordinator did not know of it, or
        although a newer claim continues it.
        """
        return replace(self, round=0, epoch=replace(held, boundary=None))

    def run_epoch(self) -> "JobState":
        return self._with_epoch(stage=Stage.RUNNING)

    # --- a running epoch -------------------------------------------------------------------------

    def arm(self, boundary: Boundary) -> "JobState":
        """Set the boundary: a new one, or the same one raised or confirmed."""
        return self._with_epoch(boundary=boundary)

    def disarm(self) -> "JobState":
        return self._with_epoch(boundary=None)

    def keep(self, step: int) -> "JobState":
        """Note that all members hold their parts of this step; near saves before it are dropped."""
        return self._with_epoch(kept=step)

    def hold_uploads(self, backlog: int) -> "JobState":
        return self._with_epoch(backlog=backlog)

    def commit(self, newest: Commit) -> "JobState":
        """Note that a checkpoint of this epoch, or of one that it continues, is in the log."""
        epoch = self.epoch
        if epoch is None or epoch.committed >= newest.step:
            return self
        if newest.epoch > epoch.number and newest.token != epoch.token:  # see `write_as`
            return self
        return self._with_epoch(committed=newest.step)

    # --- a loss whose survivors go on in place ---------------------------------------------------

    def hold_epoch(self, cause: str) -> "JobState":
        return self._with_epoch(
            stage=Stage.HOLD,
            boundary=None,
            saver=None,
            cause=cause,
            incident=self.incidents.id,
            successor=0,
            successor_token="",
        )

    def propose(self, successor: int, token: str) -> "JobState":
        """Propose the next epoch. Members that have joined it can enter no epoch with a lower
        number, and no other epoch with this number.
        """
        return self._with_epoch(successor=successor, successor_token=token)

    def end_ranks(self, ranks: tuple[int, ...]) -> "JobState":
        """Have the agents end these ranks of lost units."""
        return self._with_epoch(ended=ranks)

    def ask_vector(self, rank: int) -> "JobState":
        return self._with_epoch(asked=rank)

    def write_as(self, token: str) -> "JobState":
        """Let commits of this epoch carry the token of a claim that continues this epoch and whose
        own epoch never began.
        """
        return self._with_epoch(token=token)

    def keep_keys(self, address: str) -> "JobState":
        """The agent at this address keeps the keys of the epoch's process group."""
        return self._with_epoch(store=address)

    # --- newcomers ------------------------------------------------------------------------------

    def invite(self, joining: tuple[EpochMember, ...]) -> "JobState":
        return self._with_epoch(joining=joining)

    def begin_transfers(
        self, transfers: tuple[Transfer, ...], successor: int, token: str
    ) -> "JobState":
        return self.propose(successor, token)._with_epoch(transfers=transfers)

    def note_failed_joins(self, failed: Mapping[Id, str], now: float) -> "JobState":
        """Note that these newcomers could not join the running epoch, each with the reason."""
        return replace(self, failed_joins=stalled_joins.note(self.failed_joins, failed, now))

    # --- the end of an epoch ---------------------------------------------------------------------

    def cut_epoch(self, cause: str) -> "JobState":
        return self._with_epoch(
            stage=Stage.CUT, boundary=None, saver=None, cause=cause, incident=self.incidents.id
        )

    def choose_saver(self, saver: Saver) -> "JobState":
        return self._with_epoch(saver=saver)

    def end_epoch(self, cause: str) -> "JobState":
        """End the epoch; its workers end after this."""
        return self._with_epoch(stage=Stage.OVER, boundary=None, saver=None, cause=cause)

    def strike_step(self, cause: str, step: int, fault: str = "") -> "JobState":
        return replace(self, strike=Strike(cause=cause, step=step, fault=fault))

    def pass_over(self, manifest: str, why: str) -> "JobState":
        """Skips a checkpoint that cannot be restored: the run continues from the one before it."""
        return replace(self, broken={**self.broken, manifest: why})

    def note(self, *texts: str) -> "JobState":
        return replace(self, notes=(*self.notes, *texts)[-NOTES:])

    # --- interruptions ---------------------------------------------------------------------------

    def open_incident(self, id: str, cause: Cause, now: float) -> "JobState":
        return self.with_incidents(self.incidents.open(id, cause, now=now))

    def let_leave(self, ids: tuple[Id, ...]) -> "JobState":
        return self._with_epoch(leaving=ids)

    def cut_out(self, hung: tuple[Hung, ...]) -> "JobState":
        """Have the agents end these workers, if they still make no progress."""
        return self._with_epoch(hung=hung)

    def name_incident(self) -> "JobState":
        """Gives the open incident's id to the epoch, its next claim and its agents' log lines."""
        return self._with_epoch(incident=self.incidents.id)

    def mark(self, phase: str, now: float) -> "JobState":
        return self.with_incidents(self.incidents.mark(phase, now))

    def with_incidents(self, incidents: Incidents) -> "JobState":
        return replace(self, incidents=incidents)

    # --- faults of coordinators ------------------------------------------------------------------

    def fail(self, fault: CoordinatorFault) -> "JobState":
        return replace(self, faults=(*self.faults, fault))

    def forget_faults(self) -> "JobState":
        return replace(self, faults=())

    # --- the end of the job ----------------------------------------------------------------------

    def stop(self, at: levels.Stopped) -> "JobState":
        return replace(self, stopped=at)

    def finish(self, end: End) -> "JobState":
        """End the job. This is the last thing that this coordinator publishes, and is set once."""
        return self if self.end is not None else replace(self, round=0, end=end)

    # --- derived values
    # -----------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether an epoch has started and is not over."""
        return self.epoch is not None and self.epoch.stage is not Stage.OVER

    @property
    def final_step(self) -> int | None:
        """The step at which the script reached its end; None: it has not."""
        done = self.end is not None and self.end.cause == report.Cause.DONE.value
        return self.end.step if done and self.end else None

    @property
    def fenced(self) -> str:
        fenced = self.end is not None and self.end.cause == report.Cause.FENCED.value
        return self.end.message if fenced and self.end else ""

    @property
    def failure(self) -> levels.Failure | None:
        end = self.end
        if end is None or end.cause in _NO_FAILURE:
            return None
        return levels.Failure(cause=end.cause, message=end.message, rank=end.rank, step=end.step)

    @property
    def gone(self) -> frozenset[tuple[int, int]]:
        """Pods of the epoch that no longer hold state, by proof or by decision."""
        return read_pod_status(self.wanted).list_over(self.epoch.members if self.epoch else ())

    def may_be_operators(self, cause: Cause) -> bool:
        """Whether the operator's newest incident may have this cause: a planned change, the start of an
        epoch after none was left, or the loss of a member that the operator wants to leave or has
        given up. The operator's incident stays open until that slot trains again, which may take
        hours; the loss of another slot meanwhile is an incident of its own.
        """
        if self.epoch is None or cause.name in levels.IN_ORDER:
            return True
        pods, leave = read_pod_status(self.wanted), {*self.wanted.leave, *self.wanted.hold}
        return any(
            m.slot in leave
            or pods.is_gone(m.slot, m.attempt)
            or pods.is_replaced(m.slot, m.attempt)
            for m in self.epoch.members
            if not cause.slots or m.slot in cause.slots
        )

    def _with_epoch(self, **changes: Any) -> "JobState":
        assert self.epoch is not None
        return replace(self, epoch=replace(self.epoch, **changes))


_NO_FAILURE = frozenset(
    c.value for c in (report.Cause.DONE, report.Cause.FENCED, report.Cause.STOPPED)
)
