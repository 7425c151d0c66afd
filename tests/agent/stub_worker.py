"""A worker without torch. It speaks the agent's wire protocol, and steps, saves and restores a few numbers.

Its process group is a barrier over the group's store. Its state is one tensor of four float64 (cut
along dim 0 among the ranks) and the step in the state tree. Environment: STUB_UNTIL, STUB_STEP_MS,
STUB_IN_PLACE (1: it claims that it can keep its step, but it cannot),
STUB_SAY_LINES (the number of 100-byte lines that it prints on stdout and on stderr at each step),
STUB_PIN (`STEP:NAME`: what the script asks `job.save` for), STUB_NOT_FINITE (the steps after which its
state is NaN, separated by commas), STUB_MODE (see `misbehave`).
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import xxhash

from everstep_contract import codec, env, feed, ledger, position, wire
from everstep_contract.places import Place, name_span

UNTIL = int(os.environ.get("STUB_UNTIL", "20"))
STEP_S = int(os.environ.get("STUB_STEP_MS", "20")) / 1000
SAY_LINES = int(os.environ.get("STUB_SAY_LINES", "0"))
MODE = os.environ.get("STUB_MODE", "")
_PIN = os.environ.get("STUB_PIN", "0:").partition(":")
NOT_FINITE = os.environ.get("STUB_NOT_FINITE", "").split(",")
PIN_STEP, PIN_NAME = int(_PIN[0]), _PIN[2]
NAME = "weight"
LENGTH = 4


def values_after(step: int) -> list[float]:
    """All values differ, so that no two ranks save the same bytes."""
    return [step + 1000.0 * i for i in range(LENGTH)]


def state_after(step: int) -> dict[str, object]:
    """The state tree after `step`, where each step used two samples of a feed without shuffling."""
    order = feed.Order(length=2**20, seed=0, shuffle=False)
    used = feed.Segment(step=1, sample=0, global_batch=2, micro_batch=2, draws=step, order=order)
    records = {"1": feed.FeedRecord(segments=(used,))} if step else {}
    return {"step": step, "feeds": feed.encode_records(records)}


class Broken(Exception):
    pass


class Link:
    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.replies: dict[int, object] = {}
        self.inbox: list[object] = []
        self.cut = False
        self.next = 0
        threading.Thread(target=self.read, daemon=True).start()

    def send(self, frame: object, id: int = 0) -> None:
        with self.lock:
            self.socket.sendall(wire.encode(frame, id))

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
            case wire.Cut():
                self.cut = True
            case wire.Exit():
                sys.stdout.flush()
                os._exit(0)
            case _:
                self.inbox.append(frame)

    def take(self) -> object:
        with self.changed:
            self.changed.wait_for(lambda: self.inbox)
            return self.inbox.pop(0)

    def wait_cut(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.cut)

    def ask(self, frame: object) -> object:
        with self.changed:
            self.next += 1
            id = self.next
        self.send(frame, id)
        with self.changed:
            self.changed.wait_for(lambda: id in self.replies)
            return self.replies.pop(id)


class Worker:
    def __init__(self) -> None:
        self.page = position.PositionPage(os.environ[env.POSITION_FILE])
        self.page.own()
        self.link = Link(os.environ[env.AGENT_SOCKET])
        in_place = os.environ.get("STUB_IN_PLACE") == "1"
        self.link.send(wire.Hello(pid=os.getpid(), protocol=1, in_place=in_place))
        start = self.link.take()
        assert isinstance(start, wire.Start)
        self.start = start
        self.applied = start.applied
        self.values = self.first_values()
        self.staged = -1
        if start.manifest:
            self.restore()

    def restore(self) -> None:
        document = json.loads(Path(self.start.manifest).read_bytes())
        assert document["state"]["step"] == self.applied, document["state"]
        (tensor,) = document["tensors"]
        places = json.loads(Path(self.start.places).read_bytes())["chunks"]
        for piece in tensor["pieces"]:
            raw = self.read_chunk(piece, places.get(piece["chunk"]))
            for i in range(piece["lengths"][0]):
                (value,) = struct.unpack_from("<d", raw, piece["at"] + 8 * i)
                self.values[piece["offsets"][0] + i] = value
        self.check_restored()

    def read_chunk(self, piece: Any, place: Any) -> bytes:
        if place is None:
            return self.read_chunk(piece, self.fetch_chunk(piece, None))
        raw = Path(place["path"]).read_bytes()[place["start"] :][: place["bytes"]]
        first, count = piece["at"], 8 * piece["lengths"][0]
        wanted = place["sums"][name_span(first, count)]
        if xxhash.xxh3_64_intdigest(raw[first : first + count]) == wanted:
            return raw
        return self.read_chunk(piece, self.fetch_chunk(piece, codec.decode(Place, place)))

    def fetch_chunk(self, piece: Any, damaged: Place | None) -> Any:
        """The chunk's place, as the agent answers."""
        asked = wire.FetchChunk(epoch=self.start.epoch, digest=piece["chunk"], damaged=damaged)
        answer = self.link.ask(asked)
        assert isinstance(answer, wire.FetchedChunk)
        return codec.encode(answer.place)

    def check_restored(self) -> None:
        assert self.values == values_after(self.applied), self.values

    def first_values(self) -> list[float]:
        return values_after(0)

    def state(self) -> dict[str, object]:
        return state_after(self.applied)

    def at(self, phase: position.Phase, *, waiting: bool = False, scope: int = 1) -> None:
        self.page.write(
            position.Position(
                epoch=self.start.epoch,
                applied=self.applied,
                phase=phase,
                scope=position.Where(scope),
                waiting=waiting,
                since=time.monotonic(),
                seconds={"step": (self.applied - self.start.applied) * STEP_S},
            )
        )

    def run(self) -> None:
        self.at(position.Phase.APPLIED, scope=0)
        self.link.send(
            wire.Tracked(
                epoch=self.start.epoch, applied=self.applied, bytes=8 * LENGTH, until=UNTIL
            )
        )
        self.at(position.Phase.APPLIED)
        try:
            while self.applied < UNTIL:
                self.step()
        except Broken as error:
            self.park(sound=True, why=str(error))
        self.link.send(wire.Finished(epoch=self.start.epoch, step=self.applied))
        self.link.wait_cut()
        self.park(sound=True, why="the epoch ended")

    def step(self) -> None:
        number = self.applied + 1
        self.at(position.Phase.COMPUTING)
        misbehave(self, number)
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{number:>99}\n" * SAY_LINES)
            stream.flush()
        time.sleep(STEP_S)
        self.at(position.Phase.COMPUTING, waiting=True)
        self.barrier(number)
        self.apply(number)
        every = self.start.save_every_steps
        if number in (UNTIL, PIN_STEP) or (every and number % every == 0):
            self.stage()
        if self.page.armed == number:
            self.boundary(number)

    def apply(self, number: int) -> None:
        self.at(position.Phase.REDUCED)
        self.values = [v + 1.0 for v in self.values]
        self.applied = number
        self.at(position.Phase.APPLIED)
        entry = ledger.LedgerEntry(
            epoch=self.start.epoch, step=number, feed="1", samples=(2 * number - 2, 2 * number - 1),
            counts=(1,), weights=(2.0,), losses=(1.0 / number,), loss=1.0 / number,
        )  # fmt: skip
        self.link.send(
            wire.Applied(
                epoch=self.start.epoch,
                step=number,
                loss=1.0 / number,
                grad_norm=1.0,
                entries=(entry,),
            )
        )

    def boundary(self, number: int) -> wire.BoundaryReply:
        reply = self.link.ask(wire.AtBoundary(epoch=self.start.epoch, step=number))
        assert isinstance(reply, wire.BoundaryReply)
        if reply.save:
            self.stage(near=reply.near)
        if reply.stay:
            self.park(sound=True, why="")
        return reply

    def barrier(self, number: int) -> None:
        epoch, world = self.start.epoch, self.start.world
        self.link.send(wire.StoreSet(epoch=epoch, key=f"{number}/{self.start.rank}", value="eA=="))
        self.wait_keys(tuple(f"{number}/{r}" for r in range(world)))

    def wait_others(self, number: int) -> None:
        """Wait until the other ranks have applied all earlier steps and wait for this rank."""
        others = (r for r in range(self.start.world) if r != self.start.rank)
        self.wait_keys(tuple(f"{number}/{r}" for r in others))

    def wait_keys(self, keys: tuple[str, ...]) -> None:
        epoch = self.start.epoch
        while True:
            if self.link.cut:
                raise Broken("cut")
            reply = self.link.ask(wire.StoreCheck(epoch=epoch, keys=keys))
            assert isinstance(reply, wire.StoreReply)
            if reply.error:
                raise Broken(reply.error)
            if reply.number:
                return
            time.sleep(0.01)

    def stage(self, *, whole: bool = False, short: bool = False, near: bool = False) -> None:
        if self.staged == self.applied and not whole:
            return
        self.staged = self.applied
        pins = (PIN_NAME,) if self.applied == PIN_STEP else ()
        if misses_part(self):
            self.link.send(
                wire.Staged(
                    epoch=self.start.epoch, step=self.applied, path="", tensors=(),
                    pins=pins, problem="no room, as told", full=True,
                )
            )  # fmt: skip
            return
        world, rank, mesh = self.start.world, self.start.rank, self.start.mesh
        if whole:
            world, rank = mesh.unit, mesh.place_of(rank)
        first, last = LENGTH * rank // world, LENGTH * (rank + 1) // world
        path = os.path.join(self.start.staging, f"{os.getpid()}-{self.applied}-{whole}")
        with open(path, "wb") as file:
            if not short:
                file.write(struct.pack(f"<{last - first}d", *self.values[first:last]))
        tensors = (
            wire.StagedTensor(
                name=NAME, dtype="float64", shape=(LENGTH,), offsets=(first,), lengths=(last - first,), at=0
            ),
        )  # fmt: skip
        lead = rank == 0
        self.link.send(
            wire.Staged(
                epoch=self.start.epoch, step=self.applied, path=path,
                tensors=tensors if last > first else (),
                state=self.state() if lead else None, lead=lead, whole=whole, near=near,
                pins=pins, not_finite=(NAME,) if str(self.applied) in NOT_FINITE else (),
            )
        )  # fmt: skip

    def park(self, *, sound: bool, why: str) -> None:
        self.link.send(wire.Parked(epoch=self.start.epoch, step=self.applied, sound=sound, why=why))
        self.wait_orders()

    def wait_orders(self) -> None:
        while True:
            order = self.link.take()
            if isinstance(order, wire.Save):
                assert order.step == self.applied, (order, self.applied)
                how = misbehave_at_save()
                self.stage(whole=True, short=how == "short")


def misbehave(worker: Worker, number: int) -> None:
    """Misbehave in rank 1 at the step that STUB_MODE names.

    `fail:STEP`, `nan:STEP`, `segv:STEP`: a script error, a loss that is not finite, or SIGSEGV,
    every time. `hang:STEP:FLAGFILE`: hang once. `killed:STEP:FOLDER:TIMES` and
    `says:STEP:FOLDER:TIMES:TEXT`: SIGKILL, or an exception with this text, TIMES times in a row.
    `stuck:STEP:FLAGFILE`: SIGKILL does not end the worker while the file exists.
    """
    kind, _, rest = MODE.partition(":")
    if (
        kind in ("", "save", "noroom")
        or worker.start.rank != 1
        or number != int(rest.split(":")[0])
    ):
        return
    worker.wait_others(number)
    if kind in ("fail", "nan"):
        cause = "UserError" if kind == "fail" else "LossNotFinite"
        worker.link.send(
            wire.Failed(epoch=worker.start.epoch, step=number - 1, cause=cause, message="as told", traceback="T")
        )  # fmt: skip
        time.sleep(0.05)
        os._exit(1)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind in ("killed", "says"):
        _, folder, times, *text = rest.split(":", 3)
        if len(os.listdir(folder)) >= int(times):
            return
        Path(folder, str(os.getpid())).touch()
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        worker.link.send(
            wire.Failed(
                epoch=worker.start.epoch, step=number - 1, cause="UserError",
                message=f"RuntimeError: {text[0]}", traceback="T", fault="RuntimeError at train.py:9",
            )
        )  # fmt: skip
        time.sleep(0.05)
        os._exit(1)
    flag = rest.split(":")[1]
    if kind == "stuck" and not os.path.exists(flag):
        outlive_sigkill(flag)
    if kind == "hang" and not os.path.exists(flag):
        open(flag, "w").close()
        time.sleep(3600)


PTRACE_SEIZE, PTRACE_O_TRACEEXIT, PR_SET_PTRACER = 0x4206, 0x40, 0x59616D61


def outlive_sigkill(flag: str) -> None:
    """Hang so that SIGKILL does not end this process: a tracer stops it on its way out.

    A process that waits in a driver for a device that never answers behaves the same way. This
    process ends when the file is removed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    me = os.getpid()
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 64)
        seized = libc.ptrace(PTRACE_SEIZE, me, 0, PTRACE_O_TRACEEXIT) == 0
        part = f"{flag}.part"
        Path(part).write_text("seized" if seized else f"refused {ctypes.get_errno()}")
        os.rename(part, flag)
        while seized and os.path.exists(flag):
            time.sleep(0.05)
        os._exit(0)
    time.sleep(3600)


def misses_part(worker: Worker) -> bool:
    """With STUB_MODE `noroom:FLAGFILE`, return True for rank 1's first part, as if it had no room."""
    kind, _, flag = MODE.partition(":")
    if kind != "noroom" or worker.start.rank != 1 or os.path.exists(flag):
        return False
    open(flag, "w").close()
    return True


def misbehave_at_save() -> str:
    """With STUB_MODE `save:HOW:FLAGFILE`, the first rank that is asked for a post-mortem save dies,
    stops, or leaves a file that is too short.
    """
    kind, _, rest = MODE.partition(":")
    how, _, flag = rest.partition(":")
    if kind != "save" or os.path.exists(flag):
        return ""
    open(flag, "w").close()
    if how != "short":
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    return how


def main() -> None:
    if MODE == "raise":
        raise ValueError("no such data set")
    if MODE == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "silent":
        return
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    print("stub up", flush=True)
    Worker().run()


if __name__ == "__main__":
    main()
