"""An agent's report about one worker. Pure."""

from dataclasses import dataclass
from typing import Protocol

from everstep_agent.peers.agent_report import FailureReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod import faults
from everstep_agent.pod.progress import Progress, measure_slowed
from everstep_contract import levels, position, report, wire
from everstep_contract.sums import Sums

SCOPES = {w: levels.Scope(w.name.lower()) for w in position.Where}


class Reported(Protocol):
    """What the report needs from a worker; implemented by `worker.Worker`."""

    @property
    def local(self) -> int: ...
    @property
    def life(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def alive(self) -> bool: ...
    @property
    def parked(self) -> wire.Parked | None: ...
    @property
    def stays(self) -> bool: ...
    @property
    def finished(self) -> int: ...
    @property
    def whole(self) -> int: ...
    @property
    def unsaved(self) -> bool: ...
    @property
    def not_formed(self) -> str: ...
    @property
    def hung(self) -> str: ...
    @property
    def missed(self) -> str: ...
    @property
    def hung_since(self) -> float | None: ...
    @property
    def stuck(self) -> str: ...
    @property
    def death(self) -> faults.Death | None: ...
    @property
    def failed(self) -> FailureReport | None: ...
    @property
    def standing(self) -> wire.Standing | None: ...
    @property
    def dead_at(self) -> float | None: ...
    @property
    def overdue(self) -> float: ...
    @property
    def waited(self) -> float: ...
    @property
    def still(self) -> float: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def tracked(self) -> wire.Tracked | None: ...
    def sums(self) -> Sums | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a worker that did not report a failure."""

    status: int
    tail: str
    """The last lines that it wrote to stderr."""
    tracked: bool
    """It had sent what it tracks, so its script was training."""
    applied: int


def build_worker_report(
    worker: Reported, at: position.Position, how: str, now: float
) -> WorkerReport:
    """`at`: the position on its page; `how`: how it ended, as text, if it did."""
    applied, sound, why = at.applied, False, ""
    if worker.state is State.PARKED and worker.parked is not None:
        applied, sound = worker.parked.step, worker.parked.sound
        why = "" if worker.stays else (worker.parked.why or "its process group broke")
    elif worker.state is State.FINISHED:
        applied = worker.finished
    elif worker.state is State.HELD:
        why = worker.not_formed
    elif not worker.alive:
        why = how
    return WorkerReport(
        local=worker.local,
        life=worker.life,
        pid=worker.pid,
        state=worker.state,
        applied=applied,
        phase=int(at.phase),
        scope=SCOPES[at.scope],
        waiting=at.waiting,
        sound=sound,
        whole=worker.whole,
        unsaved=worker.unsaved,
        why=why,
        hung=bool(worker.hung),
        missed=worker.missed,
        stuck=worker.stuck,
        cause=worker.death.cause.value if worker.death else "",
        fault=worker.death.fault if worker.death else "",
        failed=worker.failed,
        standing=worker.standing,
        dead_ms=_dead_ms(worker, now),
        overdue=worker.overdue,
        stopped=worker.overdue > 0 and worker.progress.stopped,
        stopped_long=worker.overdue > 0 and worker.progress.stopped_for_long,
        waited=worker.waited,
        slowed=measure_slowed(worker.progress, now),
        still_ms=round(worker.still * 1000),
        still_limit_ms=round(worker.progress.mark.group_limit * 1000) if worker.still else 0,
        feeds=worker.tracked.feeds if worker.tracked else {},
        sums=worker.sums() if at.waiting or worker.hung or worker.overdue > 0 else None,
    )


def _dead_ms(worker: Reported, now: float) -> int | None:
    if worker.dead_at is None:
        return None
    since = worker.dead_at if worker.hung_since is None else worker.hung_since
    return round((now - since) * 1000)


def find_unheard_of(
    level: EpochLevel | None, newest: Levels | None, *, kept_out: bool
) -> EpochLevel | None:
    """The local workers' epoch, if the present coordinator does not know it, or if the workers are
    `kept_out` of the epoch that it publishes; None otherwise.
    """
    if level is None or newest is None or level.stage is Stage.OVER:
        return None
    known = newest.epoch.number if newest.epoch else 0
    return level if kept_out or known < level.number else None


def build_failure(frame: wire.Failed, table: faults.Table, *, trained: bool) -> FailureReport:
    """`trained`: the run is known to have applied a step."""
    found = faults.classify_error(
        table,
        report.Cause(frame.cause),
        frame.message,
        frame.traceback,
        fault=frame.fault,
        trained=trained or frame.step > 0,
    )
    return FailureReport(
        cause=found.cause.value,
        message=_with_meaning(frame.message, found),
        step=frame.step,
        traceback=frame.traceback,
        fault=found.fault,
    )


def _with_meaning(message: str, found: faults.Death) -> str:
    return f"{message} ({found.meaning})" if found.meaning else message


def build_exit_failure(ended: Exit, table: faults.Table, *, trained: bool) -> FailureReport:
    """The cause of a worker's end, from its exit status and its last lines."""
    tail, status = ended.tail, ended.status
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    trains = ended.tracked and status != 0
    cause = report.Cause.USER_ERROR if trains else report.Cause.SCRIPT_ERROR
    if status == 0 and ended.tracked:
        message = f"the script ended with status 0 after step {ended.applied}, before its last step"
    elif status == 0:
        message = "the script ended without training; it must call everstep.run(main) and loop over job.steps(…)"
    else:
        message = f"the script exited with status {status}" + (f": {last.strip()}" if last else "")
    found = faults.classify_error(
        table, cause, last, tail, fault=f"exit status {status}", trained=trained
    )
    return FailureReport(
        cause=found.cause.value,
        message=_with_meaning(message, found),
        step=ended.applied,
        traceback=tail,
        fault=found.fault,
    )
