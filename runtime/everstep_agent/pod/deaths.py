"""How this pod's workers ended, and what follows for the pod: another try, a wait, or the end of
the container.
"""

import os

from everstep_agent import logline
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import FailureReport
from everstep_agent.pod import device_waits, faults, spawn
from everstep_agent.pod.out_of_memory import OutOfMemory, find_group
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.worker_report import Exit, build_exit_failure, build_failure
from everstep_contract import levels, report, wire

EARLY_DEATHS = 3
"""The container ends after this many workers in a row were ended by a signal or a fault before
they joined an epoch.
"""


class Deaths:
    """`wanted` is the newest document of this kind that the agent has received."""

    def __init__(self, me: Identity, line: logline.Log) -> None:
        self.failure: FailureReport | None = None
        """Ends the job: the script cannot run anywhere."""
        self.fatal: FailureReport | None = None
        """Ends this container only, once none of its workers trains any more: a new one may work."""
        self.stuck: FailureReport | None = None
        """Ends this pod: one of its processes does not end. Kept even if it ends later: the
        operator may have replaced the pod by then.
        """
        self.waits: device_waits.Waits = ()
        self.wanted = levels.Wanted()
        self._me = me
        self._line = line
        self._table = faults.load_faults()
        self._early = 0
        self._blamed: Worker | None = None
        """The worker of `failure`, as long as the job is not known to have trained."""
        self.memory = OutOfMemory(find_group())

    @property
    def over(self) -> bool:
        """This pod starts no more workers."""
        return any(x is not None for x in (self.failure, self.fatal, self.stuck))

    def failed(self, worker: Worker, frame: wire.Failed, *, trained: bool, now: float) -> None:
        """The worker reported a failure, and will exit by itself."""
        worker.failed = build_failure(frame, self._table, trained=trained)
        self._line.say(
            "worker_failed",
            rank=worker.rank,
            cause=worker.failed.cause,
            step=frame.step,
            message=worker.failed.message,
        )
        self._note_device(worker, worker.failed.cause, worker.failed.message, now)

    def died(self, worker: Worker, *, trained: bool, now: float) -> None:
        """The worker ended without being asked to: find out why."""
        if _was_killed(worker):
            worker.killed_for = self.memory.explain(now)
        how, status = worker.exit_text(), worker.status
        self._line.say(
            "worker_ended", local=worker.local, life=worker.life, pid=worker.pid, message=how
        )
        if worker.failed is None and status is not None and os.WIFEXITED(status):
            ended = Exit(
                status=os.WEXITSTATUS(status),
                tail=worker.tail.text(),
                tracked=bool(worker.epoch) and worker.tracked is not None,
                applied=worker.last.applied,
            )
            worker.failed = build_exit_failure(ended, self._table, trained=trained)
        worker.death = self._classify(worker)
        self._note_device(worker, worker.death.cause.value, how, now)

    def _classify(self, worker: Worker) -> faults.Death:
        if worker.hung:
            learnt = worker.learnt
            return faults.Death(
                cause=report.Cause.NO_PROGRESS if learnt else report.Cause.WORKER_HUNG
            )
        if worker.failed is not None:
            cause = report.Cause(worker.failed.cause)
            return faults.Death(cause=cause, fault=worker.failed.fault)
        if worker.status is None or not os.WIFSIGNALED(worker.status):
            return faults.Death(cause=report.Cause.WORKER_DIED)
        return faults.classify_signal(self._table, os.WTERMSIG(worker.status), worker.tail.text())

    def died_early(self, worker: Worker, *, trained: bool = False) -> bool:
        """The worker ended before it joined an epoch. Returns whether to start another one.

        A script that ended by itself would do so again, so it fails the job. Unless the job has
        `trained`: then the script works, and the fault is that of this pod or its node.
        """
        death = worker.death
        assert death is not None
        of_script = worker.failed is not None and death.cause not in _RETRIED
        if of_script and not trained:
            self.failure, self._blamed = worker.failed, worker
            return False
        self._early += 1
        if self._early < EARLY_DEATHS:
            return True
        how = worker.failed.message if worker.failed else worker.exit_text()
        text = f"{self._early} workers in a row ended before they could join the training: {how}"
        cause = report.Cause.WORKER_DIED if of_script else death.cause
        self.fatal = FailureReport(cause=cause.value, message=text)
        self._line.say("workers_given_up", local=worker.local, message=text)
        return False

    def hear_trained(self) -> None:
        """The job has trained, which was not known here before: its script works elsewhere."""
        worker, self._blamed = self._blamed, None
        if worker is not None:
            self.failure = None
            self.died_early(worker, trained=True)

    def entered_epoch(self) -> None:
        """Workers have joined an epoch, so the earlier deaths were not the pod's fault."""
        self._early = 0

    def survives_kill(self, worker: Worker) -> None:
        name = f"rank {worker.rank}" if worker.epoch else f"the worker of local rank {worker.local}"
        text = f"{name} {worker.stuck}; this pod cannot continue, its slot needs another"
        self._line.say("process_stuck", local=worker.local, pid=worker.pid, message=text)
        self.stuck = self.stuck or FailureReport(
            cause=report.Cause.PROCESS_STUCK.value, message=text, step=worker.last.applied
        )

    def _note_device(self, worker: Worker, cause: str, message: str, now: float) -> None:
        if cause != report.Cause.DEVICE_FAILED.value:
            return
        slot, attempt, incarnation = self._me.id
        new = device_waits.DeviceWait(
            id=f"{slot}.{attempt}.{incarnation}.{worker.local}.{worker.life}",
            local=worker.local,
            message=message,
            since=now,
        )
        before = self.waits
        self.waits = device_waits.begin(before, new, self.wanted, slot)
        if self.waits != before:
            self._line.say("device_wait", local=worker.local, message=message)

    def look(self, now: float) -> bool:
        """Check what depends on time. Returns whether a wait for the operator's judgment ended."""
        slot = self._me.slot
        before, self.waits = (
            self.waits,
            device_waits.list_open(self.waits, self.wanted, slot, now),
        )
        for wait in (w for w in before if w not in self.waits):
            why = device_waits.why_closed(wait, self.wanted, slot)
            self._line.say("device_wait_over", local=wait.local, message=why)
        return self.waits != before


def _was_killed(worker: Worker) -> bool:
    """Whether a SIGKILL ended the worker that its agent did not send. If the agent sends one, it
    notes `killed_at` before the death.
    """
    by_agent = worker.killed_at is not None and worker.killed_at != worker.dead_at
    return worker.status is not None and spawn.was_killed(worker.status) and not by_agent


_RETRIED = frozenset(
    {report.Cause.DEVICE_FAILED, report.Cause.NETWORK_FAILED, report.Cause.WORKER_DIED}
)
