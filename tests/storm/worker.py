"""A worker of the storm: it uses the stub's protocol, trains the toy model, and writes a record for
the witness.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import stub_worker
from everstep_contract import feed, ledger, position, wire
from storm import toy
from storm.record import Record

SEED = int(os.environ["STORM_SEED"])
END = Path(os.environ["STORM_END"])
"""The file that contains the run's last step once the storm is over. That step is far enough ahead
for every rank to read the file in time.
"""


class Recorder(stub_worker.Worker):
    def __init__(self) -> None:
        super().__init__()
        start = self.start
        self.record = Record(
            epoch=start.epoch,
            rank=start.rank,
            world=start.world,
            start=start.applied,
            digest=self.digest(),
        )

    def digest(self) -> str:
        return toy.digest_of([int(v) for v in self.values])

    def check_restored(self) -> None:
        """Does nothing: the witness compares the state, not the worker."""

    def first_values(self) -> list[float]:
        return [0.0] * stub_worker.LENGTH

    def state(self) -> dict[str, object]:
        order = feed.Order(length=2**20, seed=0, shuffle=False)
        segment = feed.Segment(
            step=1,
            sample=0,
            global_batch=toy.BATCH,
            micro_batch=toy.MICRO,
            draws=self.applied,
            order=order,
        )
        records = {"1": feed.FeedRecord(segments=(segment,))} if self.applied else {}
        return {"step": self.applied, "feeds": feed.encode_records(records)}

    def step(self) -> None:
        number = self.applied + 1
        self.at(position.Phase.COMPUTING)
        if END.exists():
            stub_worker.UNTIL = int(END.read_text())
        else:
            time.sleep(stub_worker.STEP_S)
        mine = toy.share_of(number, self.start.rank, self.start.world)
        self.record.used(number, mine)
        self.at(position.Phase.COMPUTING, waiting=True)
        summed = self.reduce(number, toy.contribution(SEED, mine))
        self.at(position.Phase.REDUCED)
        self.values = [float(v) for v in toy.advance([int(v) for v in self.values], summed)]
        self.applied = number
        self.record.applied(number, self.digest())
        self.at(position.Phase.APPLIED)
        self.tell(number)
        every = self.start.save_every_steps
        if number == stub_worker.UNTIL or (every and number % every == 0):
            self.stage()
        if self.page.armed == number:
            self.boundary(number)

    def boundary(self, number: int) -> wire.BoundaryReply:
        """Mark a rank that waits for the agents' agreement as waiting, so that it does not count as
        hung.
        """
        self.at(position.Phase.APPLIED, waiting=True)
        reply = super().boundary(number)
        self.at(position.Phase.APPLIED)
        return reply

    def reduce(self, number: int, mine: list[int]) -> list[int]:
        """Return the sum over all ranks. Raises Broken if the epoch ends meanwhile."""
        epoch, world = self.start.epoch, self.start.world
        value = base64.b64encode(json.dumps(mine).encode()).decode()
        keys = tuple(f"{number}/{r}" for r in range(world))
        self.link.send(wire.StoreSet(epoch=epoch, key=keys[self.start.rank], value=value))
        while not self.ask(wire.StoreCheck(epoch=epoch, keys=keys)).number:
            time.sleep(0.005)
        parts = []
        for key in keys:
            reply = self.ask(wire.StoreGet(epoch=epoch, key=key, timeout_ms=5000))
            if reply.value is None:
                raise stub_worker.Broken(f"no {key}")
            parts.append(json.loads(base64.b64decode(reply.value)))
        return [sum(column) for column in zip(*parts, strict=True)]

    def ask(self, question: object) -> wire.StoreReply:
        if self.link.cut:
            raise stub_worker.Broken("cut")
        reply = self.link.ask(question)
        assert isinstance(reply, wire.StoreReply)
        if reply.error:
            raise stub_worker.Broken(reply.error)
        return reply

    def tell(self, number: int) -> None:
        micros = toy.BATCH // toy.MICRO
        entry = ledger.LedgerEntry(
            epoch=self.start.epoch,
            step=number,
            feed="1",
            samples=tuple(toy.samples_of(number)),
            counts=(1,) * micros,
            weights=(1.0,) * micros,
            losses=(1.0,) * micros,
            loss=1.0,
        )
        self.link.send(
            wire.Applied(
                epoch=self.start.epoch, step=number, loss=1.0, grad_norm=1.0, entries=(entry,)
            )
        )


if __name__ == "__main__":
    Recorder().run()
