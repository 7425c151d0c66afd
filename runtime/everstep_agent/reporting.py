"""What an agent's report says of one worker. Pure."""

import os

from everstep_agent.messages import EpochLevel, FailureReport, Levels, Stage, State, WorkerReport
from everstep_agent.workers import Worker
from everstep_contract import levels, position, report, wire

SCOPES = {w: levels.Scope(w.name.lower()) for w in position.Where}


def build_worker_report(worker: Worker, now: float) -> WorkerReport:
    at = worker.position()
    applied, sound, why = at.applied, False, ""
    if worker.state is State.PARKED and worker.parked is not None:
        applied, sound = worker.parked.step, worker.parked.sound
        why = "" if worker.stays else (worker.parked.why or "its group broke")
    elif worker.state is State.FINISHED:
        applied = worker.finished
    elif not worker.alive:
        why = worker.exit_words()
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
        unsaved=worker.unsaved,
        why=why,
        hung=bool(worker.hung),
        failed=worker.failed,
        dead_ms=_dead_ms(worker, now),
    )


def _dead_ms(worker: Worker, now: float) -> int | None:
    if worker.dead_at is None:
        return None
    since = worker.dead_at if worker.hung_since is None else worker.hung_since
    return round((now - since) * 1000)


def find_unheard_of(level: EpochLevel | None, newest: Levels | None) -> EpochLevel | None:
    """Our workers' epoch, if who coordinates now does not know of it."""
    if level is None or newest is None or level.stage is Stage.OVER:
        return None
    known = newest.epoch.number if newest.epoch else 0
    return level if known < level.number else None


def build_failure(frame: wire.Failed) -> FailureReport:
    return FailureReport(
        cause=frame.cause, message=frame.message, step=frame.step, traceback=frame.traceback
    )


def build_exit_failure(worker: Worker) -> FailureReport:
    """What a worker that ended by itself, without a word to us, says by its exit."""
    tail = worker.tail.text()
    assert worker.status is not None
    status = os.WEXITSTATUS(worker.status)
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    if worker.epoch and worker.tracked is not None and status != 0:
        cause = report.Cause.USER_ERROR
    else:
        cause = report.Cause.SCRIPT_ERROR
    if status == 0:
        message = "the script ended without training; it must call everstep.run(main) and loop over job.steps(…)"
    else:
        message = f"the script exited with status {status}" + (f": {last.strip()}" if last else "")
    return FailureReport(
        cause=cause.value,
        message=message,
        step=worker.last.applied,
        traceback=tail,
    )
