"""The saves of a worker: it copies its part of the state into memory, at once or beside the next step,
and hands it to its agent.
"""

import contextlib
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from everstep import device, digests, snapshot
from everstep.asked_save import AskedSave
from everstep.copier import Copier, Rest
from everstep.errors import EverstepError, StateError
from everstep.finite import FiniteCheck
from everstep.shares import Part, part_of
from everstep.slots import MOST, Slots
from everstep.snapshot import Capture
from everstep.staging import NoRoom, describe, lay_out, read_part, write_part
from everstep_contract import layout, wire
from everstep_contract.report import Cause

if TYPE_CHECKING:
    from everstep.session import Session

ROOM_SECONDS = 1.0
"""Pause between two tries to find room for a save that the job waits for."""


class Saves:
    """What a worker has staged, and the memory for it."""

    def __init__(self, session: "Session") -> None:
        self._session, start = session, session.start
        self.copier = Copier()
        self._copying = False
        """The copier has work that reads what the next step changes; `end_copy` has to wait for it."""
        self._grown = False
        """`prepare_grown` has run, for the state that optimizers created in the first step."""
        self.slots = Slots(start.staging, f"slot-{os.getpid()}-{uuid.uuid4().hex[:8]}-")
        self.staged = start.applied if start.manifest else -1
        """The newest step of which this rank's part is staged; no step is staged twice in an epoch."""
        self._staged_in = start.epoch
        """The epoch of that save. An epoch that continues this one in place drops it."""
        self.asked = AskedSave()
        self._finite = FiniteCheck(session.tracked)
        self._refused = ""
        """Why the agent cannot be given the newest copy; empty: it can."""
        self._layout = (0, "")
        """The epoch of the last save, and the digest of its layout: what the agent has."""

    @property
    def part(self) -> Part:
        """This rank's part of a save that all ranks make."""
        return part_of(
            self._session.start.mesh, self._session.membership.rank, self._session.membership.world
        )

    @property
    def lead(self) -> bool:
        """Whether this rank saves what exists only once: the state tree and the ledger."""
        return self._session.membership.rank == 0

    def prepare(self, held: Capture) -> None:
        """Allocate memory for saves, and note what is NaN or infinite from the start. This runs
        while the first step computes, and is complete before that step is applied.
        """
        size = lay_out(held.tensors, self.part, held.own)[1]

        marked = device.mark()

        def prepare() -> None:
            self._take_room(size)
            with device.beside(marked):
                self._finite.note_start(held.tensors)
            for name in sorted(self._finite.since_start):
                self._session.note(
                    f"{name} holds NaN or infinite values from the start: saves allow them"
                )

        self._copying = True
        self.copier.hold(prepare)
        self.copier.begin()

    def prepare_grown(self) -> None:
        """Allocate memory for larger saves after the first step, in which most optimizers create
        their state. This runs while the next step computes, and that step waits only until the size
        is known.
        """
        if self._grown:
            return
        self._grown = True
        self.copier.wait()
        shot, part = self._session.take_snapshot(), self.part

        def measure() -> Rest:
            held = shot.list_state()
            size = lay_out(held.tensors, part, held.own)[1]
            return lambda: self._take_room(size)

        self._copying = True
        self.copier.hold(measure)

    def _take_room(self, size: int) -> None:
        """Allocate memory for saves. If there is none now, the next save reports that."""
        with contextlib.suppress(NoRoom):
            self.slots.prepare(size)

    def stage(self, step: int, capture: Capture | None = None, *, whole: bool = False) -> None:
        """Copy this rank's part of the state as of `step` and hand it to the agent. If there is no
        room for the copy, report that to the agent.

        Args:
            whole: the ranks of this rank's unit save the full state; a unit of one rank does so
                alone.
        """
        epoch = self._session.epoch
        if self._stage(epoch, step, capture, whole=whole):
            self.staged, self._staged_in = step, epoch

    def stage_held(self, asked: wire.SaveHeld, capture: Capture) -> None:
        """Like `stage` with `whole`, for the epoch that asked. If the members continue in place,
        this save is dropped, so the step may be staged again.
        """
        self._stage(asked.epoch, asked.step, capture, whole=True)

    def _stage(self, epoch: int, step: int, capture: Capture | None, *, whole: bool) -> bool:
        """Return whether the agent has the copy."""
        began, path = time.monotonic(), self._new_path(step)
        part = self.part.of_one_unit() if whole else self.part
        with self._session.meter.charging("stall"):
            self.copier.wait()
            held = capture or self._session.capture()
            try:
                tensors = write_part(path, held.tensors, part, held.own)
            except NoRoom as error:
                self._report_no_room(epoch, step, str(error), whole=whole)
                return False
            told = digests.tell(held.tensors, part)
            bad = self._finite.list_bad(tensors, read_part(path))
        return self._hand_over(
            held,
            wire.Staged(
                epoch=epoch,
                step=step,
                path=path,
                tensors=tensors,
                lead=part.number == 0,
                whole=whole,
                digests=told,
                pins=self.asked.list_pins(step),
                not_finite=bad,
                ms=(time.monotonic() - began) * 1000,
            ),
        )

    def stage_beside(self, step: int, *, near: bool = False) -> None:
        """Like `stage`, but copy while the next step computes: from `begin_copy`, which the loop
        calls with its first batch, until `end_copy`, which it calls before anything of that step is
        applied.

        Args:
            near: as in `wire.Staged`.
        """
        if near:
            self.slots.limit = MOST
        began = time.monotonic()
        with self._session.meter.charging("stall"):
            self.copier.wait()
            shot = self._session.take_snapshot()
        self.staged, self._staged_in = step, self._session.epoch
        staged = wire.Staged(
            epoch=self._staged_in,
            step=step,
            path=self._new_path(step),
            tensors=(),
            lead=self.lead,
            near=near,
            pins=self.asked.list_pins(step),
            ms=(time.monotonic() - began) * 1000,
        )
        part = self.part
        self._copying = True
        self.copier.hold(lambda: self._copy(shot, staged, part))

    def begin_copy(self) -> None:
        """Start the held copy. Not earlier: the interpreter runs one thread at a time, so the
        boundary would wait for the copy.
        """
        self.copier.begin()

    def end_copy(self) -> None:
        """Wait until everything that the step is about to change is copied."""
        if self._copying:
            with self._session.meter.charging("stall"):
                self.copier.wait_until_read()
            self._copying = False

    def _copy(self, shot: snapshot.Snapshot, staged: wire.Staged, part: Part) -> Rest | None:
        """Runs in the copier's thread. The work that it returns needs only the copy, so no step waits for it."""
        try:
            with device.beside(shot.marked):
                held = shot.list_state()
                tensors, room = self.slots.write(staged.path, held.tensors, part, held.own)
                told = digests.tell(held.tensors, part)
        except EverstepError:
            raise  # no later save could store this state either
        except (NoRoom, OSError, RuntimeError) as error:
            self._drop_copy(staged, str(error), full=isinstance(error, (NoRoom, OSError)))
            return None
        if torn := shot.find_changed(held):
            self._drop_copy(
                staged,
                f"{torn} was changed while it was copied: change it after the loop over "
                "step.batches",
            )
            return None
        copied = replace(staged, tensors=tensors, digests=told)

        def check_and_hand_over() -> None:
            bad = self._finite.list_bad(tensors, room)
            self._hand_over(held, replace(copied, not_finite=bad))
            self._take_room(len(room))  # the other slot may still be smaller

        return check_and_hand_over

    def _drop_copy(self, staged: wire.Staged, problem: str, *, full: bool = False) -> None:
        """Free the slot of a failed copy, and report to the agent why the save fails."""
        Path(staged.path).unlink(missing_ok=True)
        self.staged = -1
        self._session.agent.send(replace(staged, path="", problem=problem, full=full, lead=False))

    def _hand_over(self, held: Capture, staged: wire.Staged) -> bool:
        """Return whether the agent has the copy now. If its tree is too large, report that."""
        digest, packed = self._describe(held, staged.epoch)
        tree = held.tree if staged.lead else None
        self._refused = ""
        try:
            self._session.agent.send(replace(staged, state=tree, layout=digest, packed=packed))
        except StateError as error:
            self._layout, self._refused = (0, ""), str(error)
            self._drop_copy(staged, str(error))
            return False
        return True

    def _describe(self, held: Capture, epoch: int) -> tuple[str, str]:
        """Return the digest of the state's layout, and the layout itself if the agent does not have it
        yet in this epoch.
        """
        described = describe(held.tensors)
        digest = layout.digest(described)
        told, self._layout = self._layout, (epoch, digest)
        return digest, "" if self._layout == told else layout.pack(described)

    def stage_surely(self, step: int) -> None:
        """Stage a save that the job waits for. It is retried, because each upload frees room. A rank
        that waits for room does not hang, but one whose copy does not end hangs, at the limit of a step.
        """
        meter = self._session.meter
        meter.begin_limit()
        self.stage_beside(step)
        with meter.charging("stall"):
            self.copier.wait()
            while self.staged != step and not self._session.broken:
                if self._refused and step == self._session.until:
                    self._session.fail(
                        Cause.MISUSE, f"no checkpoint of the last step: {self._refused}"
                    )
                with meter.charging("stall", waiting=True):
                    self._session.agent.cut.wait(ROOM_SECONDS)
                meter.begin_limit()  # each try has the whole limit
                self.stage_beside(step)
                self.copier.wait()

    def stage_again(self, step: int) -> None:
        """Like `stage_surely`, if the save of this step belongs to an epoch that was continued in place since, or
        if this rank has joined after it.
        """
        if (self.staged, self._staged_in) != (step, self._session.epoch):
            self.stage_surely(step)

    def _report_no_room(self, epoch: int, step: int, problem: str, *, whole: bool) -> None:
        self._session.agent.send(
            wire.Staged(
                epoch=epoch,
                step=step,
                path="",
                tensors=(),
                whole=whole,
                problem=problem,
                full=True,
            )
        )

    def _new_path(self, step: int) -> str:
        """The agent finds this process's files by their names, once the process has ended."""
        place = f"{self._session.epoch}-{step}-{self._session.membership.rank}"
        name = f"{place}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part"
        return str(Path(self._session.start.staging) / name)
