"""How the ranks of an epoch form their process group, and how two ranks form one to hand over state.

If several ranks form a unit, torch's default group is that of the unit, and is made once. The
groups between units are not registered in torch's globals: they form in another thread while the
main thread computes in its unit.

If each rank is a unit, `reinit` makes a new torch group. `reconfigure` (torch ≥ 2.14) keeps the
group with its threads, and changes its members. All ranks use the way of rank 0.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from everstep import device, group, group_sockets, meeting, store, unit
from everstep.errors import Misuse
from everstep.group import Group, LocalGroup, TorchGroup
from everstep.mesh import Mesh
from everstep.unit import Unit
from everstep_contract import env, units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SETTING = env.GROUP_FORMING
AUTO, REINIT, RECONFIGURE = "auto", "reinit", "reconfigure"
FORMING = timedelta(seconds=20)
"""gloo's limit for another rank's address while a group is formed. For a connection that the other rank opens it
waits five times as long (measured with torch 2.15).
"""
LIMIT = timedelta(days=1)
"""gloo's own limit, which is never reached: the agents decide whether a wait is too long."""
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With these settings torch's watchdog ends no survivor of a loss, and does not sleep for a minute
after it. The end of a group waits for the watchdog (names as in torch 2.15).
"""
CONNECT_WHEN_MADE = "NCCL_RUNTIME_CONNECT"
"""0: NCCL connects a group's ranks when the group is made, and not in its first operation (NCCL 2.22 or newer)."""
STUCK_SECONDS = 2.0
"""How long a formation waits for the former one, which a second loss has interrupted."""
_BACKEND = "everstep"
_NCCL = "nccl-legacy" if hasattr(dist.distributed_c10d, "ProcessGroupNCCL2") else "nccl"
"""In torch 2.15 `nccl` means another implementation, which was not run here."""
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


def read_setting(environ: Mapping[str, str]) -> str:
    """Read how groups are to be formed. Raises `Misuse` if the value is unknown, or if
    this torch does not support it.
    """
    setting = environ.get(SETTING) or AUTO
    choose_forming(can_reconfigure(), setting)
    return setting


def can_reconfigure() -> bool:
    """Whether torch can reconfigure a group. It refuses if the group has two backends,
    as one for CUDA tensors does.
    """
    return hasattr(dist, "_reconfigure") and not torch.cuda.is_available()


def choose_forming(capable: bool, setting: str) -> str:
    """Return `REINIT` or `RECONFIGURE`. It is `REINIT` unless the other is forced: as measured, the
    next step comes no later, and no operation of the former epoch can be in the way
    (`runtime/README.md`, Choices).

    Raises:
        Misuse: `setting` is none of the three, or needs what this rank is not `capable` of.
    """
    if setting not in (AUTO, REINIT, RECONFIGURE):
        raise Misuse(f"{SETTING}={setting}: set it to {AUTO}, {REINIT} or {RECONFIGURE}")
    if setting == RECONFIGURE and not capable:
        raise Misuse(
            f"{SETTING}={RECONFIGURE} needs torch 2.14 or newer and no CUDA device, and this is torch "
            f"{torch.__version__}{' with one' if torch.cuda.is_available() else ''}; "
            f"set it to {REINIT}, or remove it"
        )
    return RECONFIGURE if setting == RECONFIGURE else REINIT


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in an epoch."""

    epoch: int
    rank: int
    world: int
    address: str | None
    """Address of this pod; None: this machine's loopback interface."""
    mesh: units.Mesh = units.ONE_RANK
    unit: Unit | None = None
    """The unit for which the groups between units are formed; None: each rank is a unit."""
    endpoint: meeting.Endpoint | None = None
    """This rank's endpoint, if it is open already."""
    endpoints: Sequence[str] = ()
    """Those of all ranks; empty: they are exchanged in a request to the agents."""
    is_over: Callable[[], bool] = lambda: False
    """Whether this rank has been told to leave the epoch, so that its group is not needed any more."""

    def look(self) -> None:
        """Raises `StoreClosed`, a `RuntimeError`, if the epoch is over."""
        if self.is_over():
            raise store.StoreClosed("the epoch ended while its group was formed")


def form(agent: store.Requests, place: Place, setting: str = AUTO) -> Group:
    """Form the group of an epoch; blocks until every rank is there.

    Raises:
        RuntimeError: the epoch ended, or a rank was lost meanwhile, or torch still forms the former
            group.
    """
    device.enter()
    with _turn(place):
        group_sockets.forget_closed()
        if place.unit is not None:
            return form_between(agent, place, place.unit)
        if place.world == 1:
            _end_former()
            return LocalGroup()
        keys = store.AgentStore(agent, place.epoch)
        met = _meet(keys, place, setting)
        made = reconfigure(keys, place) if met.way == RECONFIGURE else reinit(keys, place, met.mesh)
        made.keys, made.mesh = keys, met.mesh
        return made


def listen(world: int, address: str | None, setting: str = AUTO) -> meeting.Endpoint:
    """Open this rank's endpoint for the next group. Raises `RuntimeError`: the pod does not have this `address`.

    Args:
        world: the most ranks that the group may have.
        address: as in `Place`.
    """
    known = address or ("127.0.0.1" if _interface() == "lo" else None)
    made = meeting.listen(world, known, choose_forming(can_reconfigure(), setting))
    if made.listener is not None:
        group_sockets.close_in_children([made.listener.socket])
    return made


def _meet(keys: store.AgentStore, place: Place, setting: str) -> meeting.Met:
    own = place.endpoint or listen(place.world, place.address, setting)
    with contextlib.closing(own):
        if place.endpoints and place.endpoints[place.rank] != own.text:
            raise RuntimeError(f"the group was planned with another endpoint of rank {place.rank}")
        texts = place.endpoints or keys.all_gather("meet", place.rank, place.world, own.text)
        met = meeting.meet(place.rank, own, texts, place.look)
    if met.way == RECONFIGURE and not can_reconfigure():
        raise RuntimeError(
            f"rank 0 has {SETTING}={RECONFIGURE}, which torch {torch.__version__} cannot do on rank "
            f"{place.rank}; give all ranks the same setting"
        )
    if met.mesh is not None:
        group_sockets.close_in_children(met.mesh.sockets)
    return met


def reinit(keys: store.AgentStore, place: Place, connections: Mesh | None = None) -> TorchGroup:
    """Make a new torch group, with threads of its own.

    Args:
        connections: gloo's addresses are exchanged over them; None: through the agents.
    """
    _end_former()
    before = group_sockets.open_sockets()
    _make(keys, place, connections)
    return _found(place, before)


def reconfigure(keys: store.AgentStore, place: Place) -> TorchGroup:
    """Keep the torch group of the former epoch, and change its members. A newcomer makes a new
    group, and so does a rank on which an operation of the former epoch hangs.
    """
    global _kept
    if _kept is None or not _kept.group.leave():
        _end_former()
        _make(keys, place, enable_reconfigure=True)
    else:
        keys = _kept.keys  # torch's group keeps the store with which it was made
        keys.enter(place.epoch)
    own = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    handles = keys.all_gather("handle", place.rank, place.world, own)
    before = group_sockets.open_sockets()
    dist._reconfigure(place.epoch, handles, timeout=FORMING).wait()  # type: ignore[attr-defined]
    _kept = _Kept(keys, _found(place, before))
    return _kept.group


@dataclass(frozen=True, slots=True)
class _Kept:
    keys: store.AgentStore
    group: TorchGroup


_kept: _Kept | None = None
"""What the last `reconfigure` formed."""
_gloo_keys: ContextVar[meeting.MeshStore | None] = ContextVar("gloo_keys", default=None)
"""Where gloo leaves its addresses while this thread makes the default group; None: in the group's own store."""
_forming = threading.Lock()
"""Held while a group is formed: torch keeps its default group in globals, and a group's sockets are
those that appear meanwhile.
"""


@contextmanager
def _turn(place: Place) -> Iterator[None]:
    """Wait for the end of the former formation. If a second loss has interrupted it, it ends at once
    while Everstep waits for a rank (`Place.is_over`). But gloo or NCCL may wait for the lost rank
    for long. The groups between units, which are in none of torch's globals, then form beside it.

    Raises:
        RuntimeError: this rank is a unit, so it cannot form its group meanwhile.
    """
    global _forming
    held = _forming
    if not held.acquire(timeout=STUCK_SECONDS):
        if place.unit is None:
            raise RuntimeError(
                f"the former group, which a second loss interrupted, is still connecting after {STUCK_SECONDS:g} s"
            )
        held = _forming = threading.Lock()
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _end_former() -> None:
    global _kept
    _kept = None
    if not dist.is_initialized():
        return
    if torch.cuda.is_available():
        # It was cut already. Shutting it down, too, would wait half a second for NCCL's threads.
        dist.distributed_c10d._world.pg_names.clear()
    dist.destroy_process_group()


def _make(keys: Any, place: Place, connections: Mesh | None = None, **settings: Any) -> None:
    """Make torch's default group. `connections`: as in `reinit`."""
    # torch names a group by a counter, and the name is part of its keys: after a formation that
    # failed on this rank alone, it would wait for keys that no other rank sets.
    dist.distributed_c10d._world.group_count = 0
    _register(place.address)
    if torch.cuda.is_available():
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    own = None if connections is None else meeting.MeshStore(connections, FORMING, place.look)
    token = _gloo_keys.set(own)
    try:
        dist.init_process_group(
            f"cpu:{_BACKEND},cuda:{_NCCL}" if torch.cuda.is_available() else _BACKEND,
            store=keys,
            rank=place.rank,
            world_size=place.world,
            timeout=LIMIT,
            **settings,
        )
    finally:
        _gloo_keys.reset(token)


def _found(place: Place, before: Mapping[int, str]) -> TorchGroup:
    made = dist.distributed_c10d._get_default_group()
    _connect_by_operation(made)
    return TorchGroup(place.rank, place.world, _own_new(before), made)


def _connect_by_operation(made: Any) -> None:
    """Run one operation in a group: NCCL connects, and blocks, during a group's first operation. So
    it does that now, and not in the script's backward.

    Raises:
        RuntimeError: NCCL has failed, or a rank did not connect in time.
    """
    if not torch.cuda.is_available():
        return
    aside = torch.cuda.Stream(device.own())  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):  # the script's own stream is busy
        work = made.allreduce([torch.zeros(1, device=device.own())])
        limit = time.monotonic() + FORMING.total_seconds()
        while not work.is_completed():
            if time.monotonic() > limit:
                raise RuntimeError(f"NCCL has not connected all ranks within {FORMING}")
            time.sleep(group.NCCL_LOOK_SECONDS)
        group.require_no_error(made)


def _connect_without_operation(groups: Iterable[Any]) -> None:
    """Connect a unit's groups, or those between units. An operation on the device would wait for
    other ranks while the unit's own collectives run, and calls that wait for the whole device would
    wait for both: ranks then wait for each other in a circle (`runtime/README.md`, On GPUs).

    Raises:
        RuntimeError: NCCL has failed, or has lost a rank.
    """
    if not torch.cuda.is_available():
        return
    for made in groups:
        made._get_backend(device.own()).eager_connect_single_device(device.own())
        group.require_no_error(made)


def form_unit(agent: store.Requests, place: Place, prefix: str) -> Unit:
    """Form the groups of this rank's unit, which last as long as the process; blocks
    until all its ranks are there.

    Args:
        place: only the rank's place in the unit counts.
        prefix: prefix of the unit's keys.

    Raises:
        RuntimeError: the epoch ended, or a rank was lost meanwhile.
    """
    mesh, own = place.mesh, place.mesh.place_of(place.rank)
    os.environ.setdefault(CONNECT_WHEN_MADE, "0")
    with _forming:
        keys = store.AgentStore(agent, place.epoch, prefix)
        before = group_sockets.open_sockets()
        _make(keys, replace(place, rank=own, world=mesh.unit))
        # gloo connects all ranks of a group when the group is made: each new socket belongs to it.
        dimensions = unit.form_dimensions(mesh, own, unit.make_group(LIMIT))
        # Now: by the script's first forward, the epoch of these keys may be over.
        _connect_without_operation(
            [dist.distributed_c10d._get_default_group(), *dimensions.values()]
        )
        sockets = _own_new(before)
        return Unit(mesh, dimensions=dimensions, device=_device(), sockets=sockets, keys=keys)


def form_between(agent: store.Requests, place: Place, own: Unit) -> TorchGroup:
    """Form the groups between units, all in parallel, because each waits for keys of other ranks."""
    wanted = unit.list_sums(place.mesh, place.rank, place.world)
    stores = [
        store.AgentStore(agent, place.epoch, f"{over.value if over else 'all'}-{ranks.start}/")
        for over, ranks in wanted.items()
    ]
    met = _meet(store.AgentStore(agent, place.epoch), place, REINIT)
    before = group_sockets.open_sockets()
    with ThreadPoolExecutor(len(wanted)) as threads:
        formed = [
            threads.submit(_make_apart, its, place.rank, ranks, place.address)
            for its, ranks in zip(stores, wanted.values(), strict=True)
        ]
    groups = dict(zip(wanted, (one.result() for one in formed), strict=True))
    _connect_without_operation(groups.values())
    place.look()  # else these sockets may be those of the next group, which forms beside this one
    sockets = _own_new(before)
    sums = {over: one for over, one in groups.items() if over is not None}
    made = TorchGroup(place.rank, place.world, sockets, groups[None], sums, own)
    made.keys, made.mesh = stores, met.mesh
    return made


def _make_apart(keys: Any, rank: int, ranks: range, address: str | None) -> Any:
    """Make a torch group that is not registered in torch's globals."""
    number, size = ranks.index(rank), len(ranks)
    made = dist.ProcessGroup(keys, number, size)
    gloo = dist.ProcessGroupGloo(_PrefixStore("cpu/", keys), number, size, make_options(address))
    gloo._set_default_timeout(LIMIT)
    kind = dist.ProcessGroup.BackendType
    made._set_default_backend(kind.GLOO)
    made._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LIMIT
        nccl = dist.ProcessGroupNCCL(_PrefixStore("cuda/", keys), number, size, options)
        made._register_backend(torch.device("cuda"), kind.NCCL, nccl)
    return made


def _own_new(before: Mapping[int, str]) -> list[socket.socket]:
    return group_sockets.own(group_sockets.list_new(before, group_sockets.open_sockets()))


def build_mesh_of_one(rank: int) -> "DeviceMesh":
    """Build torch's mesh of a unit of one rank. In a job of one rank this also makes torch's default group."""
    with _forming:
        if not dist.is_initialized():
            _make(dist.HashStore(), Place(0, 0, 1, None))  # type: ignore[attr-defined]
        alone = unit.make_group(LIMIT)([rank])
        return unit.build_device_mesh([rank], units.ONE_RANK, [alone, alone], _device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Pair:
    """Two ranks that hand something over, independently of the epoch's group."""

    def __init__(self, made: Any, other: int) -> None:
        self._made, self._other = made, other

    def send(self, tensor: torch.Tensor) -> None:
        self._made.send([tensor], self._other, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        self._made.recv([tensor], self._other, 0).wait()


def form_pair(agent: store.Requests, *, epoch: int, key: str, rank: int) -> Pair:
    """Form a group of two; blocks until the other rank is there. Raises `RuntimeError` or `TimeoutError`."""
    keys = store.AgentStore(agent, epoch, f"{key}/")
    before = group_sockets.open_sockets()
    made = dist.ProcessGroupGloo(keys, rank, 2, make_options(os.environ.get("EVERSTEP_POD_IP")))
    group_sockets.close_new_in_children(before)
    return Pair(made, 1 - rank)


def make_options(address: str | None, enable_reconfigure: bool = False) -> Any:
    """Options of gloo: one thread, at the pod's address."""
    chosen = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = {"hostname": address} if address else {"interface": _interface()}
    chosen._devices = [dist.ProcessGroupGloo.create_device(**device, lazy_init=False)]
    chosen._threads = 1
    chosen._timeout = FORMING
    if enable_reconfigure:
        chosen.enable_reconfigure = True
    return chosen


def _register(address: str | None) -> None:
    def create(options: Any, _: object) -> Any:
        reconfigured = getattr(options, "enable_reconfigure", False)
        made = dist.ProcessGroupGloo(
            _gloo_keys.get() or options.store,
            options.group_rank,
            options.group_size,
            make_options(address, reconfigured),
        )
        made._set_default_timeout(options.timeout)
        return made

    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu"])


def _interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")
