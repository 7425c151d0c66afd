"""All that one worker holds between `Start` and its end, and the few deeds that every part of a
step may need.
"""

import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from everstep import randomness, state
from everstep.errors import StateError
from everstep.group import Group
from everstep.meter import Meter
from everstep.reducer import Reducer
from everstep.restoring import Checkpoint
from everstep.rewind import Buffers
from everstep.staging import NoRoom, write_part
from everstep.tracked import Tracked
from everstep_contract import wire
from everstep_contract.ledger import LedgerEntry
from everstep_contract.report import Cause

TREE_VERSION = 1
EXIT_FAILED = 1
ROOM_SECONDS = 1.0
"""Between two looks for room for a save that must be."""


class Line(Protocol):
    """What the session needs of `link.Link`."""

    cut: Any

    def send(self, frame: Any) -> None: ...
    def request(self, frame: Any) -> Any: ...
    def wait_save(self) -> wire.Save: ...
    def leave(self, status: int) -> NoReturn: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The whole training state as of one boundary; tensors by reference unless cloned."""

    tree: dict[str, Any]
    tensors: state.Tensors

    def cloned(self) -> "Capture":
        return Capture(
            tree=self.tree,
            tensors={n: t.to("cpu", copy=True) for n, t in self.tensors.items()},
        )


@dataclass(slots=True)
class Findings:
    """What the boundary tells the agent about the step."""

    loss: float | None = None
    grad_norm: float | None = None
    entries: list[LedgerEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Session:
    def __init__(
        self, *, link: Line, group: Group, meter: Meter, start: wire.Start, seed: int
    ) -> None:
        self.link, self.group, self.meter, self.start, self.seed = link, group, meter, start, seed
        self.tracked = Tracked()
        self.reducer = Reducer(group)
        self.device = choose_device(start.local_rank)
        self.checkpoint = Checkpoint(start.manifest, start.chunks or "") if start.manifest else None
        self.buffers = Buffers(self.tracked)
        self.applied = start.applied
        self.staged = start.applied if start.manifest else -1
        """The newest step of which this rank's part is staged; no step is staged twice."""
        self.until: int | None = None
        self.windows: dict[str, tuple[float, ...]] = {}
        self.most_reductions = 0
        """The most inner loops that a step of this life has had."""
        self.findings = Findings()
        self.settled = False
        """The main thread is in `job.steps`: from here on it parks by itself."""

    @property
    def broken(self) -> bool:
        return bool(self.link.cut.is_set())

    @property
    def lead(self) -> bool:
        return self.start.rank == 0

    def track(self, objects: dict[str, Any]) -> None:
        """Register and, when resuming, load. Raises `Misuse` and `StateError`."""
        for name, thing in objects.items():
            self.tracked.add(name, thing)
        if self.checkpoint:
            trees = self._tree()["objects"]
            with self.meter.charging("restore"):
                self.tracked.load(list(objects), trees, self.checkpoint.tensor, self.device)

    def settle(self, until: int) -> None:
        """Start-up is over: what is left to restore is restored, and the agent hears so."""
        self.until = until
        self.buffers = Buffers(self.tracked)
        self.reducer.watch(list(self.tracked.named_parameters().values()))
        if self.checkpoint:
            self._restore_rest(self.checkpoint)
            self.checkpoint = None  # unmaps the chunks
        tensors = self.capture().tensors
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        self.link.send(
            wire.Tracked(epoch=self.start.epoch, applied=self.applied, bytes=size, until=until)
        )
        self.settled = True

    def capture(self) -> Capture:
        """The state as it stands; call it at a boundary, or after what the step changed was put
        back.
        """
        tensors: state.Tensors = {}
        tree = {
            "version": TREE_VERSION,
            "seed": self.seed,
            "objects": self.tracked.capture(tensors),
            "random": state.encode(randomness.capture(), "random", tensors),
            "windows": {k: list(v) for k, v in self.windows.items()},
        }
        return Capture(tree=tree, tensors=tensors)

    def stage(self, step: int, capture: Capture | None = None, *, whole: bool = False) -> None:
        """Copy this rank's part (`whole`: everything) of the state as of `step` and hand it to the
        agent. Where there is no room for it the agent hears so instead.
        """
        began, path = time.monotonic(), self._new_path(step)
        rank, world = (0, 1) if whole else (self.start.rank, self.start.world)
        with self.meter.charging("stall"):
            held = capture or self.capture()
            try:
                tensors = write_part(path, held.tensors, rank, world)
            except NoRoom as error:
                self._tell_unstaged(step, str(error), whole=whole)
                return
        lead = whole or self.lead
        self.staged = step
        self.link.send(
            wire.Staged(
                epoch=self.start.epoch,
                step=step,
                path=path,
                tensors=tensors,
                state=held.tree if lead else None,
                lead=lead,
                whole=whole,
                ms=(time.monotonic() - began) * 1000,
            )
        )

    def stage_surely(self, step: int) -> None:
        """As `stage`, for a save that the job waits for: the agent frees room with each upload."""
        self.stage(step)
        with self.meter.charging("stall", waiting=True):
            while self.staged != step and not self.broken:
                self.link.cut.wait(ROOM_SECONDS)
                self.stage(step)

    def _tell_unstaged(self, step: int, problem: str, *, whole: bool) -> None:
        self.link.send(
            wire.Staged(
                epoch=self.start.epoch, step=step, path="", tensors=(), whole=whole, problem=problem
            )
        )

    def _new_path(self, step: int) -> str:
        name = f"{self.start.epoch}-{step}-{self.start.rank}-{uuid.uuid4().hex[:8]}.part"
        return str(Path(self.start.staging) / name)

    def park(
        self, step: int, *, sound: bool = True, why: str, capture: Capture | None = None
    ) -> NoReturn:
        """Out of the group for good: save if asked, until the agent ends this process."""
        self.group.cut()
        self.link.send(wire.Parked(epoch=self.start.epoch, step=step, sound=sound, why=why))
        with self.meter.charging("idle", waiting=True):
            while True:
                save = self.link.wait_save()
                if sound and save.step == step:
                    self.stage(step, capture, whole=True)

    def fail(self, cause: Cause, message: str, traceback: str = "") -> NoReturn:
        """Say why this worker cannot go on, and end it."""
        self.link.send(
            wire.Failed(
                epoch=self.start.epoch,
                step=self.applied,
                cause=cause.value,
                message=message,
                traceback=traceback,
            )
        )
        self.link.leave(EXIT_FAILED)

    def _tree(self) -> dict[str, Any]:
        assert self.checkpoint is not None
        tree: dict[str, Any] = self.checkpoint.manifest.state or {}
        if tree.get("version") != TREE_VERSION:
            raise StateError(
                f"the checkpoint's state tree has version {tree.get('version')}; this reader "
                f"knows {TREE_VERSION}"
            )
        return tree

    def _restore_rest(self, checkpoint: Checkpoint) -> None:
        tree = self._tree()
        extra = sorted(set(tree["objects"]) - set(self.tracked.objects))
        if extra:
            self.findings.notes.append(
                f"the checkpoint also has {', '.join(extra)}, not tracked now"
            )
        if tree["seed"] != self.seed:
            self.findings.notes.append(
                f"seed was {tree['seed']}, is {self.seed}: the order changes"
            )
        self.windows = {k: tuple(v) for k, v in tree["windows"].items()}
        cpu = torch.device("cpu")
        randomness.restore(
            state.decode(tree["random"], lambda n: checkpoint.tensor(n).clone(), cpu)
        )


def choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())
