"""A unit's groups and model outlive the epoch. The groups between units form beside the unit's computation."""

import contextlib
import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from everstep import forming, group_sockets
from everstep.forming import Place
from everstep.last_sum import ignore
from everstep.unit import Over
from everstep.worker import PR_SET_PDEATHSIG
from everstep_contract import units, wire

pytestmark = pytest.mark.usefixtures("warm_for_units")

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
MESH = units.Mesh(shard=2)
LIMIT = 60.0
"""Seconds."""


class Asking:
    """Gives a rank access to the test's keys. A torch store takes one request at a time, so each thread has one."""

    def __init__(self, port: int) -> None:
        self._port, self._own = port, threading.local()

    @property
    def _store(self) -> Any:
        if not hasattr(self._own, "store"):
            self._own.store = TCPStore("127.0.0.1", self._port)
        return self._own.store

    def send(self, frame: wire.StoreSet) -> None:
        self._store.set(f"{frame.epoch}/{frame.key}", frame.value)

    def request(self, frame: wire.StoreGet | wire.StoreAllGather) -> wire.StoreReply:
        key = f"{frame.epoch}/{frame.key}"
        if isinstance(frame, wire.StoreGet):
            return wire.StoreReply(value=self._get(key))
        self._store.set(f"{key}/{frame.rank}", frame.value)
        return wire.StoreReply(
            values=tuple(self._get(f"{key}/{rank}") for rank in range(frame.world))
        )

    def _get(self, key: str) -> str:
        return str(self._store.get(key).decode())


class Member:
    """One rank, in its own process."""

    def __init__(self, port: int, epoch: int, rank: int, unit: str) -> None:
        self._keys = Asking(port)
        self._unit = forming.form_unit(
            self._keys, Place(epoch, rank, 0, None, MESH), f"unit-{unit}/"
        )
        torch.manual_seed(5)
        self._model: Any = nn.Linear(4, 4)
        fully_shard(self._model, mesh=self._unit.device_mesh["shard"])
        self._formed: Any = None

    def form(self, epoch: int, rank: int, world: int) -> tuple[float, int]:
        """Form the groups beside passes of the unit; return the seconds and the number of passes."""
        seconds, made = [], []

        def form_beside() -> None:
            began = time.monotonic()
            made.append(forming.form(self._keys, Place(epoch, rank, world, None, MESH, self._unit)))
            seconds.append(time.monotonic() - began)

        former = threading.Thread(target=form_beside)
        former.start()
        passes = 0
        more = torch.ones(1)
        while more.item():  # all ranks of a unit take the same number
            self.compute()
            passes += 1
            more.fill_(former.is_alive())
            dist.all_reduce(more)
        former.join()
        self._formed = made[0]
        return seconds[0], passes

    def compute(self) -> float:
        """Run one forward and backward in the unit; return the sum of the whole gradient."""
        self._model.zero_grad()
        self._model(torch.ones(2, 4)).sum().backward()
        return float(self._model.weight.grad.full_tensor().sum())

    def sums(self, number: float) -> tuple[float | None, ...]:
        """Return the sums over all ranks, over those of this place, and as a vector; None if not complete."""
        found = []
        for over in (None, Over.REPLICAS):
            one = torch.tensor([number])
            ends = self._formed.wait([self._formed.all_reduce(one, over)])
            found.append(one.item() if ends else None)
        self._formed.begin_sums(ignore)
        last = self._formed.start_last([], torch.tensor([number], dtype=torch.float64))
        vector = self._formed.end_last(last)
        return *found, None if vector is None else vector.item()

    def leave(self) -> None:
        self._formed.cut()
        self._formed.drop()

    def fails(self) -> bool:
        """Return whether the unit's next pass raises. If so, leave both groups, as `Session.lose_unit` does."""
        try:
            self.compute()
        except RuntimeError:
            self._formed.cut()
            self._formed.cut_unit()
            return True
        return False

    def kept_by_a_child(self) -> int:
        """Return how many sockets of the unit and of the groups a forked child has."""
        wanted = [*self._unit.sockets, *self._formed._sockets]
        child = os.fork()
        if child == 0:
            os._exit(sum(group_sockets.identify(s.fileno()).startswith("socket:") for s in wanted))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Process:
    def __init__(self, port: int, epoch: int, rank: int, unit: str) -> None:
        self._here, there = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _serve(there, port, epoch, rank, unit)
        there.close()

    def ask(self, name: str, *given: Any) -> None:
        self._here.send((name, given))

    def answer(self) -> Any:
        assert self._here.poll(LIMIT), f"no answer in {LIMIT} s"
        ok, found = self._here.recv()
        assert ok, found
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _serve(there: Any, port: int, epoch: int, rank: int, unit: str) -> None:
    torch.set_num_threads(1)
    try:
        member = Member(port, epoch, rank, unit)
        there.send((True, None))
        while True:
            name, given = there.recv()
            there.send((True, getattr(member, name)(*given)))
    except BaseException:
        with contextlib.suppress(OSError):
            there.send((False, traceback.format_exc()))
    finally:
        os._exit(1)


class Ranks:
    def __init__(self) -> None:
        self._keys = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.all: list[Process] = []

    def start(self, epoch: int, ranks: list[int], unit: str) -> list[Process]:
        made = [Process(self._keys.port, epoch, rank, unit) for rank in ranks]
        self.all += made
        for one in made:
            one.answer()
        return made


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for one in made.all:
        one.kill()


def ask(members: list[Process], name: str, *given: Any) -> list[Any]:
    for member in members:
        member.ask(name, *given)
    return [member.answer() for member in members]


def form(members: list[Process], epoch: int) -> list[Any]:
    for rank, member in enumerate(members):
        member.ask("form", epoch, rank, len(members))
    found = [member.answer() for member in members]
    print(f"epoch {epoch}: " + ", ".join(f"{s * 1000:.0f} ms, {n} passes" for s, n in found))
    return found


def sums(members: list[Process]) -> list[Any]:
    for rank, member in enumerate(members):
        member.ask("sums", 10.0**rank)
    return [member.answer() for member in members]


ALL = [(1111.0, 101.0, 1111.0), (1111.0, 1010.0, 1111.0)] * 2


def test_a_unit_goes_on_with_its_model_and_a_new_unit_comes(ranks: Ranks) -> None:
    first, second = ranks.start(1, [0, 1], "a"), ranks.start(1, [2, 3], "b")
    form(first + second, 1)
    assert sums(first + second) == ALL
    computed = ask(first, "compute")
    for lost in second:
        lost.kill()
    assert ask(first, "compute") == computed, "the loss of another unit must not break this one"
    ask(first, "leave")
    assert all(passes > 0 for _, passes in form(first, 2))
    assert sums(first) == [(11.0, 1.0, 11.0), (11.0, 10.0, 11.0)]
    assert ask(first, "compute") == computed
    assert ask(first, "kept_by_a_child") == [0, 0]

    newcomers = ranks.start(2, [0, 1], "c")
    ask(first, "leave")
    form(first + newcomers, 3)
    assert sums(first + newcomers) == ALL
    assert ask(first + newcomers, "compute") == computed * 2
    ask(first, "leave")
    assert ask(first, "compute") == computed, "a cut must not close the unit's sockets"


def test_a_rank_that_is_lost_takes_only_its_unit_along(ranks: Ranks) -> None:
    first, second = ranks.start(1, [0, 1], "a"), ranks.start(1, [2, 3], "b")
    form(first + second, 1)
    second[1].kill()
    assert ask(second[:1], "fails") == [True]
    assert ask(first, "fails") == [False, False]
    assert [found[-1] for found in sums(first)] == [None, None]
    assert ask(first, "fails") == [False, False]
