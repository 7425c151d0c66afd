"""The smallest program that speaks the agent's side of `everstep_contract.wire`, for any number of
workers.

It keeps the group's keys, records every frame and does what the test tells it; it makes no decisions.
Workers are forked from this process, which has imported torch once.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep_agent.coordinator import regroup_rules
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract import env, wire
from everstep_contract.position import Position, PositionPage
from runtime.a_job import take_over

LIMIT = float(os.environ.get("AN_AGENT_LIMIT", "120"))


LAST_STEP = "last-step"
"""The file for which `await_end` waits."""


def await_end() -> None:
    """In a worker, wait until the test lets it take its last step. So no worker ends too early, however slow the
    test's own process is.
    """
    gate = Path(os.environ[env.POSITION_FILE]).with_name(LAST_STEP)
    limit = time.monotonic() + LIMIT
    while not gate.exists() and time.monotonic() < limit:
        time.sleep(0.005)


class Gone(Exception):
    """The worker ended before it did what the test waited for."""


@dataclass
class Worker:
    rank: int
    pid: int
    page: PositionPage
    connection: socket.socket | None = None
    frames: list[Any] = field(default_factory=list)
    status: int | None = None
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, frame: Any, number: int = 0) -> None:
        assert self.connection is not None
        with self.sending:
            self.connection.sendall(wire.encode(frame, number))

    def of(self, kind: type[Any]) -> list[Any]:
        return [f for f in self.frames if isinstance(f, kind)]

    @property
    def position(self) -> Position:
        return self.page.read()


def _name(frame: Any) -> str:
    """The frame's name, and its problem if it has one."""
    return f"{type(frame).__name__} {getattr(frame, 'problem', '')}".strip()


class Agent:
    """Runs `main` in each of `world` forked workers, and records their frames in `workers[rank].frames`."""

    def __init__(self, folder: Path, main: Callable[[], None], world: int, **start: Any) -> None:
        self.folder, self.world = folder, world
        self.staging = folder / "staging"
        self.staging.mkdir(parents=True, exist_ok=True)
        self.workers: list[Worker] = []
        self.boundary = wire.BoundaryReply()
        self._news = threading.Condition()
        self._keys: dict[tuple[int, str], str] = {}
        self._main = main
        self._path = str(folder / "agent.sock")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._path)
        self._server.listen()
        self._start = wire.Start(
            epoch=1, rank=0, world=world, local_rank=0, local_world=world, node_rank=0, job="ns/test",
            run="ns/test", staging=str(self.staging),
        )  # fmt: skip
        self._start = replace(self._start, **start)
        self.epoch = self._start.epoch

    def begin(self) -> None:
        for rank in range(self.world):
            page = str(self.folder / f"position-{rank}")
            self.workers.append(Worker(rank=rank, page=PositionPage(page, create=True), pid=0))
            self.workers[rank].pid = self._fork(page)
        for _ in range(self.world):
            connection, _address = self._server.accept()
            hello = self._read(connection)
            assert hello is not None
            worker = next(w for w in self.workers if w.pid == hello.frame.pid)
            worker.connection = connection
            threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        for worker in self.workers:
            unit = f"unit-{self._start.mesh.unit_of(worker.rank)}"
            worker.send(replace(self._start, rank=worker.rank, local_rank=worker.rank, unit=unit))

    def _fork(self, page: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.environ[env.AGENT_SOCKET], os.environ[env.POSITION_FILE] = self._path, page
            log = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            self._main()
        finally:
            os._exit(3)

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def wait_for(
        self,
        what: Callable[[Worker], bool],
        ranks: Sequence[int] | None = None,
        limit: float = LIMIT,
    ) -> None:
        """Wait until `what` is true for the workers of `ranks` (default: all)."""
        wanted = [self.workers[r] for r in (range(self.world) if ranks is None else ranks)]
        with self._news:
            if not self._news.wait_for(lambda: all(what(w) for w in wanted), timeout=limit):
                found = {w.rank: [_name(f) for f in w.frames[-3:]] for w in wanted}
                self._show_stacks()
                raise TimeoutError(f"last frames: {found}\n{self.output()[-14000:]}")

    def wait_applied(self, step: int, ranks: Sequence[int]) -> None:
        """Poll until the pages of these ranks show this step."""
        limit = time.monotonic() + LIMIT
        while any(self.workers[r].position.applied < step for r in ranks):
            if time.monotonic() > limit:
                self.wait_for(lambda _: False, ranks, limit=0.0)
            time.sleep(0.001)

    def wait_complete_buckets(self, rank: int, step: int, count: int) -> None:
        """Poll until the rank's page shows so many complete buckets of this step."""
        limit, worker = time.monotonic() + LIMIT, self.workers[rank]

        def are_complete() -> bool:
            sums = worker.page.read_sums(worker.position)
            return sums is not None and (sums.step, sums.complete) == (step, count)

        while not are_complete():
            if time.monotonic() > limit:
                self.wait_for(lambda _: False, [rank], limit=0.0)
            time.sleep(0.001)

    def _show_stacks(self) -> None:
        """Make workers print their stacks into the output, which a failure's message quotes."""
        for worker in self.living:
            os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def wait_ended(self, ranks: Sequence[int] | None = None) -> list[int]:
        self.wait_for(lambda w: w.status is not None, ranks)
        return [w.status or 0 for w in self.workers]

    def finish(self) -> None:
        """Let all workers take the last step, reach the end and leave."""
        (self.folder / LAST_STEP).touch()
        self.wait_for(lambda w: bool(w.of(wire.Finished)) or w.status is not None)
        for worker in self.workers:
            if worker.status is None:
                worker.send(wire.Exit())
        self.wait_ended()

    def kill(self, rank: int) -> None:
        os.kill(self.workers[rank].pid, signal.SIGKILL)
        self.wait_ended([rank])

    @property
    def living(self) -> list[Worker]:
        return [w for w in self.workers if w.status is None]

    def regroup(self, before_start: Callable[[], None] = lambda: None) -> regroup_rules.Plan:
        """Cut the epoch and let all surviving workers continue in the next one. Call `before_start`
        once their standings are known.
        """
        old, members = self.epoch, self._end_lost_units()
        for worker in members:
            worker.send(wire.Cut(epoch=old, keep=True))
        plan = self._plan(old, members)
        level = EpochLevel(
            number=old, token="", stage=Stage.HOLD, members=(), mesh=self._start.mesh
        )
        place = regroup_rules.build_in_place(level, plan, [w.rank for w in members])
        before_start()
        with self._news:
            self.epoch += 1
            self._news.notify_all()
        lives = (1,) * len(members)
        mine = EpochMember(
            slot=0, attempt=0, incarnation=1, node_rank=0, first=0, lives=lives, address=""
        )
        level = replace(level, number=self.epoch, members=(mine,), in_place=place)
        for rank, worker in enumerate(members):
            if worker.status is None:
                worker.send(build_regroup(rank, level, mine))
        return plan

    def _end_lost_units(self) -> list[Worker]:
        """Kill the living ranks of units that are not whole; return the others."""
        mesh, living = self._start.mesh, {w.rank for w in self.living}
        for rank in sorted(living):
            if not living.issuperset(mesh.list_unit_of(rank)):
                self.kill(rank)
        return self.living

    def _plan(self, epoch: int, members: list[Worker]) -> regroup_rules.Plan:
        told = {w.rank: self._standing(w, epoch) for w in members}
        while True:
            plan = regroup_rules.plan_regroup(told, self._start.mesh)
            match plan:
                case regroup_rules.Plan():
                    return plan
                case regroup_rules.Impossible():
                    raise AssertionError(plan.reason)
            worker = self.workers[plan.rank]
            worker.send(wire.GiveVector(epoch=epoch))
            self.wait_for(lambda w: any(s.vector for s in w.of(wire.Standing)), [plan.rank])
            told[plan.rank] = self._standing(worker, epoch)

    def _standing(self, worker: Worker, epoch: int) -> wire.Standing:
        def found(w: Worker) -> list[wire.Standing]:
            return [s for s in w.of(wire.Standing) if s.epoch == epoch]

        self.wait_for(lambda w: bool(found(w)), [worker.rank])
        return found(worker)[-1]

    def until_printed(self, word: str, times: int) -> None:
        """Poll the output file until it contains `word` at least `times` times."""
        end = time.monotonic() + LIMIT
        while self.output().count(word) < times:
            if time.monotonic() > end:
                raise TimeoutError(self.output()[-3000:])
            time.sleep(0.01)

    def close(self) -> None:
        for worker in self.workers:
            if worker.status is None and worker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in self.workers:
            if worker.connection is None and worker.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(worker.pid, 0)
                worker.status = -1
        self.wait_for(lambda w: w.status is not None)
        for worker in self.workers:
            worker.page.close()
        self._server.close()

    def _listen(self, worker: Worker) -> None:
        assert worker.connection is not None
        while (envelope := self._read(worker.connection)) is not None:
            if isinstance(envelope.frame, wire.StoreGet | wire.StoreAllGather):
                # It may wait for a key that this worker sends next.
                threading.Thread(
                    target=self._reply, args=(worker, envelope), name="a-get", daemon=True
                ).start()
                reply = None
            else:
                reply = self._answer(envelope.frame)
            if isinstance(envelope.frame, wire.Staged):
                take_over(envelope.frame.path)
            with self._news:
                worker.frames.append(envelope.frame)
                self._news.notify_all()
            if reply is not None:
                worker.send(reply, envelope.id)
        with worker.sending:
            worker.connection.close()
        _, status = os.waitpid(worker.pid, 0)
        with self._news:
            worker.status = os.waitstatus_to_exitcode(status)
            self._news.notify_all()

    def _reply(self, worker: Worker, envelope: wire.Envelope) -> None:
        reply = self._answer(envelope.frame)
        with contextlib.suppress(OSError):  # the worker has ended
            worker.send(reply, envelope.id)

    def _answer(self, frame: Any) -> Any:
        match frame:
            case wire.StoreSet():
                with self._news:
                    self._keys[frame.epoch, frame.key] = frame.value
                    self._news.notify_all()
            case wire.StoreGet():
                place = frame.epoch, frame.key
                with self._news:
                    self._news.wait_for(
                        lambda: place in self._keys or frame.epoch != self.epoch, timeout=LIMIT
                    )
                if frame.epoch != self.epoch:
                    return wire.StoreReply(error="the epoch is over")
                return wire.StoreReply(value=self._keys.get(place))
            case wire.StoreAllGather():
                return self._all_gather(frame)
            case wire.StoreAdd():
                with self._news:
                    place = frame.epoch, frame.key
                    number = int(wire.from_text(self._keys.get(place, "")) or b"0") + frame.amount
                    self._keys[place] = wire.to_text(str(number).encode())
                    self._news.notify_all()
                return wire.StoreReply(number=number)
            case wire.StoreCompareSet():
                with self._news:
                    place = frame.epoch, frame.key
                    if self._keys.get(place, "") == frame.expected:
                        self._keys[place] = frame.desired
                        self._news.notify_all()
                    return wire.StoreReply(value=self._keys.get(place, frame.expected))
            case wire.StoreCheck():
                return wire.StoreReply(
                    number=int(all((frame.epoch, k) in self._keys for k in frame.keys))
                )
            case wire.AtBoundary():
                return self.boundary
        return None

    def _all_gather(self, frame: wire.StoreAllGather) -> wire.StoreReply:
        places = [(frame.epoch, f"{frame.key}/{rank}") for rank in range(frame.world)]
        with self._news:
            self._keys[places[frame.rank]] = frame.value
            self._news.notify_all()
            self._news.wait_for(
                lambda: all(one in self._keys for one in places) or frame.epoch != self.epoch,
                timeout=LIMIT,
            )
            if frame.epoch != self.epoch:
                return wire.StoreReply(error="the epoch is over")
            return wire.StoreReply(values=tuple(self._keys[one] for one in places))

    def _read(self, connection: socket.socket) -> wire.Envelope | None:
        head = _exactly(connection, wire.LENGTH.size)
        if head is None:
            return None
        body = _exactly(connection, *wire.LENGTH.unpack(head))
        return wire.decode(body) if body is not None else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        try:
            more = connection.recv(count - len(found))
        except OSError:
            return None
        if not more:
            return None
        found += more
    return found


@contextlib.contextmanager
def agent(folder: Path, main: Callable[[], None], world: int, **start: Any) -> Iterator[Agent]:
    made = Agent(folder, main, world, **start)
    try:
        made.begin()
        yield made
    finally:
        made.close()
