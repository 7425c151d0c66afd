"""The stub worker, with units that go on in place. It computes nothing: a pass is an entry of a list.

Environment, besides that of `stub_worker`: STUB_ORDERS (a folder: each worker writes what it computed for each step),
STUB_UNIT_LOST (a file: the worker whose pid is in it tells that a collective of its unit has failed).
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import stub_worker
from stub_worker import Broken

from everstep_contract import ledger, position, wire
from everstep_contract.ranges import list_ranges, to_ranges

MICRO_BATCHES = 7
ORDERS = Path(os.environ["STUB_ORDERS"])
UNIT_LOST = Path(os.environ.get("STUB_UNIT_LOST", "/no/file"))
SUMS = wire.to_text(b"\0" * 8)


class Link(stub_worker.Link):
    """Keeps the frames of an epoch that goes on in place apart."""

    applied = 0
    """Of the worker: what it gives to newcomers."""

    def __init__(self, path: str) -> None:
        self.keep, self.give_vector = 0, 0
        self.regroup: wire.Regroup | None = None
        super().__init__(path)

    def read(self) -> None:
        file = self.socket.makefile("rb")
        while head := file.read(wire.LENGTH.size):
            (length,) = wire.LENGTH.unpack(head)
            envelope = wire.decode(file.read(length))
            with self.changed:
                if envelope.id:
                    self.replies[envelope.id] = envelope.frame
                else:
                    self.take_in(envelope.frame)
                self.changed.notify_all()
        os._exit(3)

    def take_in(self, frame: object) -> None:
        match frame:
            case wire.Cut(keep=True):
                self.keep = frame.epoch
            case wire.Cut():
                self.cut = True
            case wire.Exit():
                os._exit(0)
            case wire.Regroup():
                self.regroup = frame
            case wire.GiveVector():
                self.give_vector = frame.epoch
            case wire.GiveState():
                value = wire.to_text(str(self.applied).encode())
                self.send(wire.StoreSet(epoch=frame.epoch, key=frame.key, value=value))
            case _:
                self.inbox.append(frame)


class Worker(stub_worker.Worker):
    link: Link

    def __init__(self) -> None:
        super().__init__()
        self.reductions, self.told = 0, 0
        self.order: list[int | None] | None = None
        self.assigned: wire.Regroup | None = None
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
        told, self.assigned = self.assigned, None
        mesh, rank, world = self.start.mesh, self.start.rank, self.start.world
        self.order = []
        if told is None or told.share is None:
            shares = mesh.count_shares(world)
            self.add(plan(mesh.data_index(rank), shares), 0)
            first = mesh.data_index(mesh.list_unit_of(rank).start)
            self.add((), len(plan(first, shares)))
        else:
            self.add(list_ranges(told.begun or ()), told.begun_passes)
            self.add(list_ranges(told.share), told.passes)

    def add(self, share: object, passes: int) -> None:
        assert self.order is not None
        self.order += [i for i in share if i not in self.order]  # type: ignore[attr-defined]
        self.order += [None] * (passes - len(self.order))

    def reduce(self) -> bool:
        """Whether all ranks are here."""
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
        self.at(position.Phase.REDUCED)
        with (ORDERS / str(os.getpid())).open("a") as file:
            mesh, rank = self.start.mesh, self.start.rank
            file.write(
                json.dumps([number, mesh.unit_of(rank), mesh.data_index(rank), self.order]) + "\n"
            )
        self.values = [v + 1.0 for v in self.values]
        self.applied = self.link.applied = number
        self.reductions, self.order = self.reductions + 1, None
        self.at(position.Phase.APPLIED)
        entry = ledger.LedgerEntry(
            epoch=self.start.epoch, step=number, feed="1", samples=(2 * number - 2, 2 * number - 1),
            counts=(1,), weights=(2.0,), losses=(1.0 / number,), loss=1.0 / number,
        )  # fmt: skip
        self.link.send(
            wire.Applied(
                epoch=self.start.epoch, step=number, loss=1.0, grad_norm=1.0, entries=(entry,)
            )
        )
        if number == stub_worker.UNTIL:
            self.stage()

    def boundary(self, number: int) -> None:
        reply = self.link.ask(wire.AtBoundary(epoch=self.start.epoch, step=number))
        assert isinstance(reply, wire.BoundaryReply)
        if reply.save:
            self.stage()
        if reply.stay:
            self.park(sound=True, why="")
        self.holds = reply.hold

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
        """Until the next epoch goes on."""
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
        if self.order is None:
            self.assigned = frame
        else:
            self.add(list_ranges(frame.share or ()), frame.passes)
        self.link.applied = self.applied
        self.link.send(wire.Regrouped(epoch=frame.epoch))


def plan(index: int, shares: int) -> range:
    each, more = divmod(MICRO_BATCHES, shares)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


if __name__ == "__main__":
    stub_worker.Link = Link  # type: ignore[misc]
    Worker().run()
