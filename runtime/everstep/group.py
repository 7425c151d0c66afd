"""The ranks of one epoch as one process group, and how to come out of it when it breaks.

gloo gives no handle to abort with, so the sockets that appear while the group is formed are
duplicated; to cut is to shut the duplicates down, after which every operation of every neighbour
fails within a millisecond. A gloo operation may still be left waiting (measured: 3 runs of several
hundred), so one that has not returned shortly after a cut is abandoned with its buffer.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep import store

LOOK = timedelta(milliseconds=100)
"""How often a waiting rank looks whether it was cut."""
ABANDON_SECONDS = 0.05
LIMIT = timedelta(days=1)
"""gloo's own limit: whether a wait is too long is the agents' decision, never one rank's."""
_BACKEND = "everstep"


class Group(Protocol):
    rank: int
    world: int

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start a sum in place; None if the group is broken."""

    def wait(self, works: Sequence[Any]) -> bool:
        """Whether all of them are complete; False means this rank must leave the group."""

    def cut(self) -> None:
        """Make every operation fail, here and at the neighbours.

        Any thread, any number of times.
        """


class LocalGroup:
    """A world of one: every sum is there already."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self._cut = threading.Event()

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return None if self._cut.is_set() else tensor

    def wait(self, works: Sequence[Any]) -> bool:
        return all(work is not None for work in works)

    def cut(self) -> None:
        self._cut.set()


class TorchGroup:
    """torch's default group over gloo, with nccl for CUDA tensors."""

    def __init__(self, rank: int, world: int, sockets: Iterable[socket.socket]) -> None:
        self.rank, self.world = rank, world
        self._sockets = list(sockets)
        self._cut_at: float | None = None
        self._group: Any = dist.distributed_c10d._get_default_group()

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        if self._cut_at is not None:
            return None
        try:
            return self._group.allreduce([tensor])
        except RuntimeError:  # the error's traceback would keep the group's objects alive
            self.cut()
            return None

    def wait(self, works: Sequence[Any]) -> bool:
        if all(work is not None and self._returned(work) for work in works):
            return self._settled()
        self.cut()
        return False

    def cut(self) -> None:
        if self._cut_at is None:
            self._cut_at = time.monotonic()
        for duplicate in self._sockets:
            _shut_down(duplicate)
        if dist.get_backend_config().find("nccl") >= 0:
            self._group.abort()

    def _returned(self, work: Any) -> bool:
        """`wait` raises for a failed operation and for our own limit; only of one that was complete
        before the wait is it certain which.
        """
        while True:
            complete = work.is_completed()
            try:
                work.wait(LOOK)
                return True
            except RuntimeError:
                if complete:
                    return False
            if self._cut_at is not None and time.monotonic() > self._cut_at + ABANDON_SECONDS:
                return False

    def _settled(self) -> bool:
        """On CUDA a returned wait only orders the stream: the host waits for the sums."""
        if not torch.cuda.is_available():
            return True
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        while not done.query():  # type: ignore[no-untyped-call]
            if self._cut_at is not None:
                return False
            time.sleep(0.0002)
        return True


def form(link: store.Asks, *, epoch: int, rank: int, world: int, address: str | None) -> Group:
    """Form the group of an epoch; blocks until every rank is there.

    Raises:
        RuntimeError: the epoch ended, or a rank was lost meanwhile.
    """
    if world == 1:
        return LocalGroup()
    _register(address)
    before = _open_sockets()
    dist.init_process_group(
        f"cpu:{_BACKEND},cuda:nccl" if torch.cuda.is_available() else _BACKEND,
        store=store.AgentStore(link, epoch),
        rank=rank,
        world_size=world,
        timeout=LIMIT,
    )
    numbers = sorted(_open_sockets() - before)
    return TorchGroup(rank, world, _owned(numbers))


def _register(address: str | None) -> None:
    """gloo with one thread (the vector stands behind every bucket) and bound to the pod's own
    address.
    """

    def create(options: Any, _: object) -> Any:
        chosen = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device = {"hostname": address} if address else {"interface": _interface()}
        chosen._devices = [dist.ProcessGroupGloo.create_device(**device, lazy_init=False)]
        chosen._threads = 1
        chosen._timeout = options.timeout
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, chosen)

    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu"])


def _interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def _open_sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except FileNotFoundError:
            continue
    return found


def _owned(numbers: Sequence[int]) -> list[socket.socket]:
    """Duplicates of the group's sockets, and no child that keeps them open after our death (peers
    would stay blind).
    """
    duplicates = []
    for number in numbers:
        os.set_inheritable(number, False)
        duplicate = socket.socket(fileno=os.dup(number))
        # Shut down, gloo's listener makes its accept fail, and gloo answers with std::terminate.
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.close()
        else:
            duplicates.append(duplicate)
    copies = [*numbers, *(d.fileno() for d in duplicates)]
    os.register_at_fork(after_in_child=lambda: _close_all(copies))
    return duplicates


def _close_all(numbers: Sequence[int]) -> None:
    for number in numbers:
        try:
            os.close(number)
        except OSError:
            continue


def _shut_down(duplicate: socket.socket) -> None:
    try:
        duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
