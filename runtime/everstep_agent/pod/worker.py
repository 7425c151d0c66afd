"""What the agent knows about one worker: its process, its place in the epoch, its last frames."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from everstep_agent.peers.agent_report import FailureReport, State
from everstep_agent.pod import faults, output, spawn
from everstep_agent.pod.progress import Progress
from everstep_contract import position, wire
from everstep_contract.sums import Sums


@dataclass(slots=True, eq=False)
class Worker:
    local: int
    life: int
    pid: int
    page: position.PositionPage
    page_path: str
    spawned_at: float
    tail: output.Tail = field(default_factory=output.Tail)
    state: State = State.SPAWNED
    in_place: bool = False
    """It can keep its step when others are lost."""
    writer: asyncio.StreamWriter | None = None
    epoch: int = 0
    rank: int = 0
    ready_at: float | None = None
    started_at: float | None = None
    fetches: int = 0
    """How many chunks of the checkpoint it waits for."""
    fetched_at: float = 0.0
    """When it last received one."""
    cut_at: float | None = None
    dead_at: float | None = None
    asked: bool = False
    """Exit was sent, or the agent killed it because its epoch is over."""
    joins: int = 0
    """The running epoch that it gets ready to join; 0: none."""
    unit: str = ""
    """The unit whose groups it formed for that (`wire.Start.unit`)."""
    taken: int | None = None
    """The step whose state it has copied from a member; None: none yet."""
    takes_since: float | None = None
    """When it was told to copy that state."""
    taking: wire.TakingState | None = None
    """How much of that state has arrived."""
    orders: set[str] = field(default_factory=set)
    """Keys of the transfers that it was told to make."""
    held: int = 0
    """The epoch for which it was told to hold."""
    standing: wire.Standing | None = None
    asked_vector: bool = False
    parked: wire.Parked | None = None
    tracked: wire.Tracked | None = None
    applied: wire.Applied | None = None
    staged: int = 0
    whole: int = 0
    """As in `WorkerReport`."""
    stays: bool = False
    """It was asked to stay at a boundary, so parking there does not count as a break."""
    finished: int = 0
    failed: FailureReport | None = None
    death: faults.Death | None = None
    """What it died of; None: it is alive, or ended because it was asked to."""
    shown: float = 0.0
    """`position.since` of the last scope in which it was asked for its stacks."""
    progress: Progress = field(default_factory=Progress)
    overdue: float = 0.0
    """As in `WorkerReport`."""
    waited: float = 0.0
    """As in `WorkerReport`."""
    still: float = 0.0
    """Seconds for which nothing has moved in the sum that it waits in."""
    told_wait: float = 0.0
    """Time of the mark for which the coordinator was told that the worker waits."""
    told_still: tuple[float, int] | None = None
    """Time of the mark for which the coordinator was told that nothing moves, and how many times before."""
    hung: str = ""
    missed: str = ""
    """As in `WorkerReport`."""
    learnt: bool = False
    """It hangs because it exceeded the limit that it has learnt, or because a signal stopped it.
    Such a hang uses no restart budget.
    """
    hung_since: float | None = None
    killed_at: float | None = None
    frozen: float = 0.0
    """Seconds since then in which this agent did not run."""
    stuck: str = ""
    """Not empty: it survives SIGKILL. It may hold its device, and is not proven dead."""
    not_formed: str = ""
    """Why it could not form the group of its epoch."""
    status: int | None = None
    killed_for: str = ""
    """Why SIGKILL ended it; empty: not known."""
    last: position.Position = field(default_factory=position.Position)
    last_sums: Sums | None = None
    asking: tuple[int, int] | None = None
    """Request id and step of an unanswered AtBoundary."""
    saving: int | None = None
    """Step of the post-mortem save that was ordered."""
    saving_since: float | None = None
    """Not None: that save is not staged yet."""
    keeping: int | None = None
    """Step of the save that was ordered while the worker holds its step."""
    unsaved: bool = False
    """What it staged was unusable."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    """A signal has ended it: none of its threads runs any more. The kernel may still be freeing its
    memory.
    """
    killed_by: int = 0
    """That signal."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Its process is reaped."""
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Applies this worker's one-way store frames before its later requests."""
    store_errors: dict[int, str] = field(default_factory=dict)
    """Epoch → why one of its one-way frames was lost. Reported with the worker's next request of
    that epoch.
    """

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    @property
    def without_group(self) -> bool:
        """Whether it gets ready to join a running epoch, or was told to leave its group."""
        joins = self.joins != 0 and self.epoch == 0
        return joins or self.cut_at is not None or 0 < self.held == self.epoch

    def send(self, frame: Any, id: int = 0) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(wire.encode(frame, id))

    def position(self) -> position.Position:
        if self.alive:
            with contextlib.suppress(ValueError):
                self.last = self.page.read()
        return self.last

    def sums(self) -> Sums | None:
        """How far it is with the sums of its reduction."""
        if self.alive:
            self.last_sums = self.page.read_sums(self.position())
        return self.last_sums

    def kill(self) -> None:
        if self.alive:
            self.killed_at = self.killed_at or time.monotonic()
            spawn.kill_group(self.pid)

    def note_killed(self, signal_number: int) -> None:
        self.killed_by = signal_number
        self.killed.set()

    def exit_text(self) -> str:
        if self.hung:
            return self.hung
        return ", ".join(filter(None, (spawn.describe_exit(self.status), self.killed_for)))
