"""What follows from a worker's frame, for the worker's state and for its pod."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Stage
from everstep_agent.pod.arming import order_save
from everstep_agent.pod.components import Components
from everstep_agent.pod.relay import STORE_FRAMES
from everstep_agent.pod.worker import Worker
from everstep_contract import places, wire

NOTES = 5
"""The last notes that are kept of each kind."""


class WorkerFrames:
    """`apply_again` applies the newest levels: a worker is ready for them."""

    def __init__(self, parts: Components, apply_again: Callable[[], None]) -> None:
        self._parts = parts
        self._epoch = parts.epoch
        self._workers = parts.workers
        self._line = parts.context.line
        self._touch = parts.news.touch
        self._apply_again = apply_again
        self.notes: tuple[str, ...] = ()
        """What every rank notes in the same words, as the first local rank sends it."""
        self.own_notes: tuple[str, ...] = ()
        """What single ranks note."""

    def forget_notes(self) -> None:
        self.notes = self.own_notes = ()

    def take(self, worker: Worker, envelope: wire.Envelope) -> None:
        frame = envelope.frame
        if isinstance(frame, STORE_FRAMES):
            self._parts.relay.take(worker, envelope)
            return
        if not worker.alive and not isinstance(frame, (wire.Applied, wire.Staged)):
            return  # sent before the worker was killed; only completed work still counts
        match frame:
            case wire.Hello():
                worker.state, worker.ready_at = State.READY, time.monotonic()
                worker.in_place = frame.in_place
                self._workers.processes.heard(worker)
                self._line.say("worker_ready", local=worker.local, life=worker.life, pid=worker.pid)
            case wire.Tracked():
                worker.state, worker.tracked = State.TRACKED, frame
                if worker.epoch:  # one that gets ready to join has no rank yet
                    self._parts.say_that_it_runs(worker)
            case wire.Stops() if worker.tracked is not None:
                worker.tracked = replace(worker.tracked, until=frame.step)
            case wire.Applied():
                self._applied(worker, frame)
            case wire.AtBoundary() if self._epoch.leaving.step:
                worker.asking = (envelope.id, frame.step)
                self._apply_again()
                return  # the report of its death follows
            case wire.AtBoundary():
                worker.asking = (envelope.id, frame.step)
                if self._epoch.level is not None:
                    self._epoch.arming.answer(self._epoch.level, [worker])
            case wire.FetchChunk():
                give = partial(_give_chunk, worker, envelope.id)
                worker.fetches += self._parts.restorer.bring(frame, give)
            case wire.Staged():
                self._parts.saves.take(worker, frame, self._epoch.level)
            case wire.Standing():
                self._standing(worker, frame)
            case wire.TakingState():
                worker.taking = frame
            case wire.StateTaken():
                if frame.problem:
                    self._parts.holds.refuse(worker.local, frame.problem, differs=frame.differs)
                self._parts.joining.taken(worker, frame)
            case wire.Regrouped():
                self._regrouped(worker, frame)
            case wire.Parked():
                self._parked(worker, frame)
            case wire.Finished():
                worker.state, worker.finished = State.FINISHED, frame.step
            case wire.Failed():
                worker.state, trained = State.FAILED, self._epoch.trained
                self._parts.deaths.failed(worker, frame, trained=trained, now=time.monotonic())
            case _:  # from a newer protocol, or a frame that only agents send: ignored
                kind = type(frame).__name__
                self._line.say("frame_ignored", local=worker.local, pid=worker.pid, kind=kind)
                return
        if not isinstance(frame, (wire.Applied, wire.Standing, wire.Regrouped)):
            self._touch()
        if isinstance(frame, (wire.Hello, wire.Parked)):
            self._apply_again()

    def _applied(self, worker: Worker, frame: wire.Applied) -> None:
        worker.applied = frame
        # The last step of the former epoch may be marked applied after this one has begun.
        level = self._epoch.level
        ended = level.resume if level is not None and level.in_place is not None else 0
        if frame.epoch == self._epoch.number or frame.step <= ended:
            self._parts.book.add(frame.entries)
        if frame.notes and worker.local == 0:
            self.notes = (*self.notes, *frame.notes)[-NOTES:]
        self.own_notes = (*self.own_notes, *frame.own_notes)[-NOTES:]
        told = frame.notes or frame.own_notes
        if told or (level is not None and frame.step == level.resume + 1):
            self._touch()

    def _standing(self, worker: Worker, frame: wire.Standing) -> None:
        if frame.epoch == worker.epoch:
            worker.standing = frame
            if worker.state in (State.STARTED, State.TRACKED):
                worker.state = State.HELD
        # A coordinator that waits for all local ranks learns nothing from a report before, and the report would only
        # take a core that a rank needs.
        if not self._epoch.holds or frame.problem or self._workers.all_stand():
            self._touch()

    def _regrouped(self, worker: Worker, frame: wire.Regrouped) -> None:
        if frame.problem:
            self._line.say("regroup_failed", rank=worker.rank, message=frame.problem)
            if frame.epoch == worker.epoch:
                worker.not_formed = frame.problem
        elif frame.epoch == worker.epoch and worker.state is State.HELD and not worker.standing:
            worker.state = State.TRACKED
        if frame.problem or all(w.state is not State.HELD for w in self._workers.current.values()):
            self._touch()

    def _parked(self, worker: Worker, frame: wire.Parked) -> None:
        worker.state, worker.parked = State.PARKED, frame
        if worker.joins and not worker.epoch:
            self._not_prepared(worker, frame)
        level = self._epoch.level
        if level is not None and level.stage is Stage.CUT:
            order_save(level, [worker], time.monotonic())

    def _not_prepared(self, worker: Worker, frame: wire.Parked) -> None:
        self._line.say("not_prepared", local=worker.local, message=frame.why)
        if self._workers.fresh.get(worker.local) is worker:  # otherwise it was no longer invited
            self._parts.holds.refuse(worker.local, frame.why)
        self._parts.joining.recycle(0, "a worker of this pod did not get ready to join")


def _give_chunk(worker: Worker, request: int, place: places.Place) -> None:
    worker.fetches, worker.fetched_at = worker.fetches - 1, time.monotonic()
    worker.send(wire.FetchedChunk(place=place), request)
