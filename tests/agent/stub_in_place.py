"""The stub worker, with units that continue in place. It computes nothing: a pass is an entry in a list.

Environment, besides that of `stub_worker`: STUB_ORDERS (a folder in which each worker writes what it computed for each
step), STUB_UNIT_LOST (a file; the worker whose pid is in it reports that a collective of its unit has failed).
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import stub_worker  # type: ignore[import-not-found]
from stub_worker import Broken

from everstep_contract import position, wire
from everstep_contract.ranges import list_ranges, to_ranges

MICRO_BATCHES = 7
ORDERS = Path(os.environ["STUB_ORDERS"])
UNIT_LOST = Path(os.environ.get("STUB_UNIT_LOST", "/no/file"))
SUMS = wire.to_text(b"\0" * 8)


class Link(stub_worker.Link):
    """Handles the frames that let an epoch continue in place."""

    applied = 0
    """The worker's last applied step, sent to newcomers as the state."""

    def __init__(self, path: str) -> None:
        self.keep, self.give_vector = 0, 0
        self.regroup: wire.Regroup | None = None
        super().__init__(path)

    def take_in(self, frame: object) -> None:
        match frame:
            case wire.Cut(keep=True):
                self.keep = frame.epoch
            case wire.Regroup():
                self.regroup = frame
            case wire.GiveVector():
                self.give_vector = frame.epoch
            case wire.GiveState():
                value = wire.to_text(str(self.applied).encode())
                self.send(wire.StoreSet(epoch=frame.epoch, key=frame.key, value=value))
            case _:
                super().take_in(frame)


class Worker(stub_worker.Worker):
    link: Link

    def __init__(self) -> None:
        super().__init__()
        self.reductions, self.told = 0, 0
        self.order: list[int | None] | None = None
        self.assigned: list[int | None] | None = None
        """The passes of the next loop, if this worker was told them because another one has begun it."""
        self.holds = False
        self.form_unit()

    # --- the unit, and newcomers ------------------------------------------------------------------

    def form_unit(self) -> None:
        mesh, start = self.start.mesh, self.start
        keys = tuple(f"{start.unit}/{place}" for place in range(mesh.unit))
        mine = keys[mesh.place_of(start.rank)]
        self.link.send(wire.StoreSet(epoch=start.epoch, key=mine, value="eA=="))
        self.wait_keys(keys)

    def join(self) -> None:
        order = self.link.take()
        assert isinstance(order, wire.TakeState)
        self.wait_keys((order.key,))
        reply = self.link.ask(wire.StoreGet(epoch=order.epoch, key=order.key, timeout_ms=1000))
        assert isinstance(reply, wire.StoreReply)
        self.applied = int(wire.from_text(reply.value or ""))
        self.values = stub_worker.values_after(self.applied)
        self.link.send(wire.StateTaken(epoch=order.epoch, applied=self.applied))
        self.hold()

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        if self.start.join:
            self.start = replace(self.start, join=False)
            self.join()
        number = self.applied + 1
        self.at(position.Phase.COMPUTING)
        self.begin()
        if self.holds:
            self.holds = False
            self.tell()
            self.hold()
        time.sleep(stub_worker.STEP_S)
        self.at(position.Phase.COMPUTING, waiting=True)
        while self.applied < number and not self.reduce():
            self.hold()
        if self.applied < number:
            self.complete(number)
        if self.page.armed == number:
            self.boundary(number)

    def begin(self) -> None:
        self.order, self.assigned = self.assigned, None
        if self.order is None:
            mesh, rank = self.start.mesh, self.start.rank
            shares = mesh.count_shares(self.start.world)
            first = mesh.data_index(mesh.list_unit_of(rank).start)
            self.order = extend([], plan(mesh.data_index(rank), shares), len(plan(first, shares)))

    def reduce(self) -> bool:
        """Return whether all ranks have contributed."""
        epoch, prefix = self.start.epoch, f"sum-{self.reductions}"
        self.link.send(wire.StoreSet(epoch=epoch, key=f"{prefix}/{self.start.rank}", value="eA=="))
        keys = tuple(f"{prefix}/{rank}" for rank in range(self.start.world))
        while self.link.keep != epoch and not self.link.cut:
            reply = self.link.ask(wire.StoreCheck(epoch=epoch, keys=keys))
            assert isinstance(reply, wire.StoreReply)
            if reply.number:
                return True
            if UNIT_LOST.exists() and UNIT_LOST.read_text() == str(os.getpid()):
                self.tell(unit_lost=True)
                time.sleep(60)
            time.sleep(0.01)
        return False

    def complete(self, number: int) -> None:
        with (ORDERS / str(os.getpid())).open("a") as file:
            start, mesh = self.start, self.start.mesh
            place = mesh.unit_of(start.rank), mesh.data_index(start.rank)
            file.write(json.dumps([number, start.epoch, *place, self.order]) + "\n")
        self.apply(number)
        self.link.applied = number
        self.reductions, self.order = self.reductions + 1, None
        if number == stub_worker.UNTIL:
            self.stage()

    def boundary(self, number: int) -> wire.BoundaryReply:
        reply = super().boundary(number)
        self.holds = reply.hold
        return reply

    # --- in place ---------------------------------------------------------------------------------

    def tell(self, *, unit_lost: bool = False, vector: str = "") -> None:
        begun = self.order is not None
        self.link.send(
            wire.Standing(
                epoch=self.start.epoch,
                applied=self.applied,
                reductions=self.reductions,
                share=to_ranges(i for i in self.order or () if i is not None) if begun else None,
                micro_batches=MICRO_BATCHES if begun else 0,
                passes=len(self.order or ()),
                unit_lost=unit_lost,
                vector=vector,
            )
        )

    def hold(self) -> None:
        """Wait until the next epoch continues this one."""
        link = self.link
        while True:
            with link.changed:
                link.changed.wait_for(self.has_news)
                frame, link.regroup = link.regroup, None
                asked, link.give_vector = link.give_vector == self.start.epoch, 0
            if frame is not None:
                self.enter(frame)
                return
            if link.cut:
                raise Broken("cut")
            if asked:
                self.tell(vector=SUMS)
            else:
                self.told = link.keep
                self.tell()

    def has_news(self) -> bool:
        link = self.link
        held = link.keep == self.start.epoch != self.told
        return bool(link.regroup or link.cut or held or link.give_vector)

    def enter(self, frame: wire.Regroup) -> None:
        behind = bool(frame.vector)
        if behind:
            self.complete(self.applied + 1)
        self.start = replace(self.start, epoch=frame.epoch, rank=frame.rank, world=frame.world)
        self.reductions = 0
        if self.order is not None:
            self.order = extend(self.order, list_ranges(frame.share or ()), frame.passes)
        else:
            self.assigned = assign(frame, self.assigned)
        self.link.applied = self.applied
        self.link.send(wire.Regrouped(epoch=frame.epoch))


def assign(frame: wire.Regroup, assigned: list[int | None] | None) -> list[int | None] | None:
    if frame.share is None:
        return None
    order: list[int | None] = []
    if frame.begun is not None:
        order = assigned or extend([], list_ranges(frame.begun), frame.begun_passes)
    return extend(order, list_ranges(frame.share), frame.passes)


def extend(order: list[int | None], share: Iterable[int], passes: int) -> list[int | None]:
    longer = [*order, *(i for i in share if i not in order)]
    return longer + [None] * (passes - len(longer))


def plan(index: int, shares: int) -> range:
    each, more = divmod(MICRO_BATCHES, shares)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


if __name__ == "__main__":
    stub_worker.Link = Link  # type: ignore[misc]
    Worker().run()
