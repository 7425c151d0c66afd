"""Finds the workers of this pod that hang, and ends them.

By the job's limits the agent decides alone. For the limits that workers have learnt, it only
reports how far each worker is beyond its limit. The coordinator decides whether to cut a worker
out, because only the coordinator knows whether the others wait for it.
"""

from collections.abc import Callable, Iterable, Sequence

from everstep_agent import logline
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Hung
from everstep_agent.pod import hang, progress
from everstep_agent.pod.progress_watch import ProgressWatch
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import wire

STACK_SECONDS = 0.3
"""Limit for a hung worker to write its stack; then it is killed."""
SHORT_STACK_SECONDS = 0.05
"""The same for a worker beyond the limit that it has learnt. A stopped worker cannot write one."""

STOPPED = "stopped"
"""The scope of a worker that a signal has stopped."""


class HangWatch:
    """`tell` is called when the coordinator needs a new report."""

    def __init__(self, workers: WorkerSet, tell: Callable[[], None], line: logline.Log) -> None:
        self._workers, self._line = workers, line
        self._progress = ProgressWatch(tell)
        self._looked: float | None = None
        self._stops: tuple[hang.Stop, ...] = ()

    def look(self, limits: hang.Limits, now: float, node: str = "") -> None:
        """Apply the job's limits: end workers that hang, and make workers that have waited for long
        show their stacks.

        Args:
            node: the pod's node, for the log; empty: not known.
        """
        self._stops = hang.note_stop(self._stops, self._looked or now, now)
        self._looked = now
        for worker in self._workers.processes.alive:
            self._end_hung(worker, limits, now, node)
            self._show_long_wait(worker, limits, now)

    def look_at_progress(self, most: float) -> float:
        """Look at how far workers are beyond the limits that they have learnt.

        Returns the seconds until the next look. No learnt limit counts as longer than `most`.
        """
        return self._progress.look(self._workers.processes.alive, most)

    def end(self, named: Iterable[Hung], slot: int, node: str = "") -> None:
        """End the workers that the coordinator has named, unless they have made progress since."""
        for found in named:
            worker = self._workers.current.get(found.local) if found.slot == slot else None
            if worker is None or worker.life != found.life or not _may_hang(worker):
                continue
            if worker.overdue >= 1 and worker.page.read_mark().at == worker.progress.mark.at:
                worker.missed = found.missed
                self._end_overdue(worker, node)

    def _end_overdue(self, worker: Worker, node: str) -> None:
        where = hang.name_step(worker.position())
        worker.learnt, worker.hung = True, progress.describe(worker.progress, where)
        worker.hung_since = worker.progress.mark.at
        self._say("no_progress", worker, node)
        self._workers.processes.put_down(
            worker, 0.0 if worker.progress.stopped else SHORT_STACK_SECONDS
        )

    def _end_hung(self, worker: Worker, limits: hang.Limits, now: float, node: str) -> None:
        found = _find_hang(worker, limits, now, self._stops) if _may_hang(worker) else None
        if found is None:
            return
        worker.hung, worker.hung_since = found.message, now - found.seconds
        worker.learnt = found.scope == STOPPED
        self._say("worker_hung", worker, node)
        self._workers.processes.put_down(worker, STACK_SECONDS)

    def _say(self, event: str, worker: Worker, node: str) -> None:
        sums = worker.sums()
        next_sum = sums.describe_next() if sums is not None else ""
        known = {"node": node, "next_sum": next_sum, "missed": worker.missed}
        told = {name: text for name, text in known.items() if text}
        self._line.say(event, rank=worker.rank, pid=worker.pid, **told, message=worker.hung)

    def _show_long_wait(self, worker: Worker, limits: hang.Limits, now: float) -> None:
        """If a worker has waited for others longer than a worker may compute, make it show its
        stacks; once in each step or other scope.
        """
        if worker.state is not State.TRACKED or worker.asked or worker.cut_at is not None:
            return
        position, started = worker.position(), worker.started_at or now
        text = hang.describe_long_wait(
            position, started=started, limits=limits, now=now, stops=self._stops
        )
        if text is not None and worker.shown != position.since:
            worker.shown = position.since
            worker.send(wire.ShowStack())
            self._line.say("worker_waits", rank=worker.rank, pid=worker.pid, message=text)


def _may_hang(worker: Worker) -> bool:
    return worker.alive and not worker.hung and not worker.asked


def _find_hang(
    worker: Worker, limits: hang.Limits, now: float, stops: Sequence[hang.Stop]
) -> hang.Hang | None:
    if worker.without_group and worker.progress.stopped_for_long:
        spent = worker.progress.seconds
        what = "it left its group" if worker.epoch else "it got ready to join"
        text = f"hung: stopped by a signal (state T) for {spent:.1f} s, while {what}"
        return hang.Hang(scope=STOPPED, seconds=spent, message=text)
    silent = hang.count_seconds(worker.spawned_at, now, stops)
    if worker.state is State.SPAWNED and silent > limits.startup:
        text = (
            f"hung: the script has not called everstep.run within {silent:.0f} s of its start; make its imports "
            "faster, or raise recovery.startupSeconds (--startup-seconds)"
        )
        return hang.Hang(scope="startup", seconds=silent, message=text)
    saves = worker.saving_since
    spent = hang.count_seconds(saves, now, stops) if saves is not None else 0.0
    if spent > limits.step:
        text = (
            f"hung: {spent:.0f} s in a save; the limit is {limits.step:.0f} s ({hang.STEP_SETTING})"
        )
        return hang.Hang(scope="save", seconds=spent, message=text)
    computes = worker.state in (State.STARTED, State.TRACKED)
    # Its socket's thread reports HELD, whatever its script does. Nobody waits for it to hold once it is cut.
    must_park = worker.state is State.HELD and worker.cut_at is not None
    waits_for_agent = worker.asking is not None or (worker.fetches > 0 and worker.cut_at is None)
    if not (computes or must_park) or waits_for_agent:
        return None
    return hang.classify_hang(
        worker.position(),
        started=max(worker.started_at or now, worker.fetched_at),
        cut=worker.cut_at,
        limits=limits,
        now=now,
        stops=stops,
    )
