"""What one worker holds between `Start` and its end, and what every part of a step may have to
do: capture, park, fail.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from everstep import (
    checkpoint_reader,
    device,
    forming,
    randomness,
    rewind,
    sharded,
    snapshot,
    spread,
    state,
    untracked,
)
from everstep.at_track import AtTrack
from everstep.buffers import Buffers
from everstep.checkpoint_reader import Checkpoint
from everstep.errors import StateError
from everstep.feeds import SETTINGS_KEY, Feeds, decode_settings
from everstep.local_state import LocalState
from everstep.membership import Membership
from everstep.meter import Meter
from everstep.reducer import Reducer
from everstep.saves import Saves
from everstep.snapshot import Capture
from everstep.tracked import Tracked
from everstep.transfer import Taken
from everstep_contract import codec, feed, wire
from everstep_contract.ledger import LedgerEntry
from everstep_contract.places import Place
from everstep_contract.report import Cause

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from everstep.step_state import StepState

EXIT_FAILED = 1


class AgentPort(Protocol):
    """What the session needs of `agent_socket.AgentSocket`."""

    cut: Any

    def send(self, frame: Any) -> None: ...
    def send_soon(self, frame: Any) -> None: ...
    def request(self, frame: Any) -> Any: ...
    def wait_save(self) -> wire.Save: ...
    def leave(self, status: int) -> NoReturn: ...


@dataclass(slots=True)
class Findings:
    """What the boundary reports to the agent about a step."""

    loss: float | None = None
    grad_norm: float | None = None
    entries: list[LedgerEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own_notes: list[str] = field(default_factory=list)


class Session:
    """One life of a worker, from `Start` to its end."""

    def __init__(
        self,
        *,
        agent: AgentPort,
        membership: Membership,
        meter: Meter,
        start: wire.Start,
        seed: int,
        exact_reduction: bool = False,
    ) -> None:
        self.agent, self.membership, self.meter = agent, membership, meter
        self.start, self.seed = start, seed
        self.tracked = Tracked()
        self.at_track = AtTrack(self.tracked)
        self._exact = exact_reduction
        self.reducer = Reducer(
            exact=exact_reduction, marks=meter.sums, tell=membership.count_complete
        )
        self._device_mesh: DeviceMesh | None = None
        self.device = device.own()
        self.checkpoint = (
            Checkpoint(start.manifest, start.places or "", self._fetch) if start.manifest else None
        )
        self.buffers = Buffers(self.tracked)
        self.applied = start.applied
        self.told_epoch = 0
        """Epoch of the last step that was reported to the agent."""
        self.local = LocalState()
        self.saves = Saves(self)
        self.until: int | None = None
        self._stopped: int | None = None
        """The step after which `job.stop` ends this run."""
        self.windows: dict[str, tuple[float, ...]] = {}
        self._frozen_at_start: list[str] = []
        self._modes_at_start: list[str] = []
        """`Tracked.list_frozen` and `Tracked.list_modes` when training began in this process."""
        self.most_reductions = 0
        """The largest number of inner loops in a step of the run."""
        self.findings = Findings()
        self.feeds = Feeds(self._recorded_feeds(), applied=start.applied, note=self.note)
        self.settled = False
        """The main thread has reached `job.steps`; from then on it parks by itself."""
        self.gave_torn = False
        """A tensor changed while this rank handed its state to a newcomer during a step. From then
        on the rank waits at the boundary while it hands over its state.
        """
        self.step: StepState | None = None
        """The step whose body runs now."""
        self._final: tuple[Any, ...] | None = None
        """Fingerprint of the state after the last step; None: `until` is not reached yet."""

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    @property
    def broken(self) -> bool:
        return bool(self.agent.cut.is_set())

    @property
    def finished(self) -> bool:
        """Whether `until` is reached; the last checkpoint is staged then."""
        return self._final is not None

    def find_mesh(self) -> "DeviceMesh":
        """Return `job.mesh`. If each rank is a unit, the first call makes it."""
        if self._device_mesh is None:
            unit = self.membership.group.unit
            if unit is not None:
                self._device_mesh = unit.device_mesh
            else:
                why = "its script uses job.mesh, whose groups end with the epoch"
                self.membership.stay_in_epoch(why)
                self._device_mesh = forming.build_mesh_of_one(self.membership.rank)
        return self._device_mesh

    def list_buffers(self) -> Buffers:
        """List the buffers of what is tracked now."""
        return self.buffers if self.settled else Buffers(self.tracked)

    def track(self, objects: dict[str, Any]) -> None:
        """Register objects, and load them from the checkpoint. Raises `Misuse`, `StateError`."""
        with self.tracked.all_or_none():
            for name, thing in objects.items():
                self.tracked.add(name, thing)
            self.tracked.require_known(objects)
        for name in objects:
            self.at_track.note_parameters(name)
        self.at_track.note_groups(objects)
        if self.checkpoint:
            trees = self._tree()["objects"]
            with self.meter.charging("restore"):
                told = self.tracked.load(list(objects), trees, self.checkpoint.read, self.device)
                self.tracked.load_rates(list(objects), trees, self.checkpoint.read, self.device)
            if told:
                self.note(
                    f"the checkpoint has another dtype than the script for {rewind.join_names(told)}: its "
                    "values were converted, so the run is not continued bit for bit"
                )
        begins = self.checkpoint is None and not self.start.join
        self.at_track.note_values(objects, begins=begins)

    def track_local(self, objects: dict[str, Any]) -> None:
        """Like `track`, for state that belongs to this rank alone."""
        self.local.add(objects)
        if self.checkpoint:
            rank, world = self.membership.rank, self.membership.world
            with self.meter.charging("restore"):
                notes = self.local.load(list(objects), self.checkpoint, rank, world, self.device)
            for note in notes:
                self.note(note)

    def _fetch(self, digest: str, damaged: Place | None) -> Place:
        """Return the place of a chunk that was not here, or was damaged at this place. If no sound
        copy exists anywhere, the agent ends this process.
        """
        asked = wire.FetchChunk(epoch=self.epoch, digest=digest, damaged=damaged)
        found: Place = self.agent.request(asked).place
        return found

    def settle(self, until: int) -> None:
        """End the start-up: restore what is left, and report to the agent."""
        self.feeds.close()
        self.buffers = Buffers(self.tracked)
        spread.prepare_fsdp(dict(self.tracked.of_kind("module")))
        parameters = self.tracked.named_parameters()
        spread.require_known(parameters, self._device_mesh, exact=self._exact)
        self.reducer.watch(list(parameters.values()))
        rewind.show_steps(self.tracked)
        self.at_track.require_same_groups()
        self.at_track.require_same_since_track()
        self.at_track.require_same_parameters()
        self._frozen_at_start = self.tracked.list_frozen()
        self._modes_at_start = self.tracked.list_modes()
        if self.checkpoint:
            self._restore_rest(self._tree(), self.checkpoint.tensor)
            if left := self.local.describe_left_over(self.checkpoint, self.membership.rank):
                self.note(left)
            self.checkpoint = None  # unmaps the chunks
        self.until = until if self._stopped is None else min(until, self._stopped)
        held = self.capture()
        size = sum(
            t.numel() * t.element_size() for t in [*held.tensors.values(), *held.own.values()]
        )
        self.saves.prepare(held)
        self.agent.send(
            wire.Tracked(
                epoch=self.epoch,
                applied=self.applied,
                bytes=size,
                until=self.until,
                feeds=self.feeds.describe(),
                fixed=self.membership.why_fixed,
            )
        )
        untracked.watch(self)
        if told := untracked.describe_schedule(self.tracked):
            self.note(told)
        self.settled = True
        self.membership.set_apart("")

    def adopt(self, taken: Taken) -> None:
        """Take over the live state of another member. Raises `StateError`."""
        tree, tensors = taken.tree, taken.tensors

        def read(wanted: Mapping[str, torch.Tensor | sharded.Like | None]) -> state.Tensors:
            lay = {n: sharded.lay_local if n in taken.parts else sharded.divide for n in wanted}
            return {n: lay[n](tensors[n], like) for n, like in wanted.items()}

        try:
            records, settings = feed.decode_records(tree), decode_settings(tree)
        except codec.DecodeError as error:
            raise StateError(f"the state of a running rank: {error}") from None
        self.feeds.adopt(records, taken.applied, settings)
        self.tracked.load(list(self.tracked.objects), tree["objects"], read, self.device)
        self._restore_rest(tree, tensors.__getitem__)
        if self._stopped is not None:  # it joins at the boundary after the last step
            self.stop(self._stopped)
        self.buffers = Buffers(self.tracked)
        self.applied = taken.applied
        self.membership.take_over(taken.applied)
        self.meter.update(applied=taken.applied)
        self.saves.prepare(self.capture())

    @property
    def reached_end(self) -> bool:
        return self.until is not None and self.applied >= self.until

    def stop(self, step: int) -> None:
        """Make this step the last one. It has not ended yet."""
        if step != self.until:
            self.until = self._stopped = step
            self.agent.send(wire.Stops(step=step))

    def finish(self) -> None:
        """Record that the last step is applied. From now on the ranks stay as they are, and its save is one of all
        of them: no later save follows that could replace one that a change of the ranks has dropped.
        """
        with self.meter.charging("wait", waiting=True):
            self.membership.go_apart("it has reached the last step")
        if not self.broken:
            self.saves.stage_again(self.applied)
        self._final = rewind.fingerprint(self.tracked)

    def is_sound(self) -> bool:
        """Whether the state is still that of the last applied step, so that it may be saved."""
        mark = self.step.mark if self.step is not None else self._final
        return mark is not None and rewind.fingerprint(self.tracked) == mark

    def note(self, text: str) -> None:
        """Add a sentence to the job's status; it is sent with the report of the next step. Every rank adds it in
        the same words.
        """
        self.findings.notes.append(text)

    def note_own(self, text: str) -> None:
        """The same for something that has happened on this rank only."""
        self.findings.own_notes.append(f"rank {self.membership.rank}: {text}")

    def capture(self) -> Capture:
        """Capture the state as it is: at a boundary, or after the changes of a step were undone."""
        tensors: state.Tensors = {}
        objects = self.tracked.capture(tensors)
        rest = self._capture_rest()
        tree = {**rest.tree, "objects": objects}
        return Capture(tree=tree, tensors=tensors | rest.tensors, own=rest.own)

    def take_snapshot(self) -> snapshot.Snapshot:
        """Take a snapshot at a boundary; its state is listed and copied while the next step computes."""
        return snapshot.take(self.tracked, self.buffers, self._capture_rest())

    def _capture_rest(self) -> Capture:
        """Capture everything but the tracked objects. The tensors are copies."""
        tensors: state.Tensors = {}
        tree = {
            "version": checkpoint_reader.TREE_VERSION,
            "seed": self.seed,
            "feeds": self.feeds.encode(),
            SETTINGS_KEY: self.feeds.encode_settings(),
            "random": state.encode(randomness.capture(), "random", tensors),
            "windows": {k: list(v) for k, v in self.windows.items()},
            "most_reductions": self.most_reductions,
            "frozen": [self._frozen_at_start, self.tracked.list_frozen()],
            "modes": [self._modes_at_start, self.tracked.list_modes()],
            "stopped": None if self._stopped is None else [self.start.run, self._stopped],
        }
        return Capture(tree=tree, tensors=tensors, own=self.local.capture(self.membership.rank))

    def lose_unit(self, why: str) -> None:
        """Handle the failure of a collective within this rank's unit: make it fail on the unit's
        other ranks, too. If units recover in place, report the loss to the agent. The agent then
        ends this process, or parks all ranks; only in the second case does this method return.
        """
        self.membership.group.cut()
        self.membership.group.cut_unit()
        if self.membership.can_regroup:
            self.membership.lose_unit(why)
            with self.meter.charging("idle", waiting=True):
                self.agent.cut.wait()

    def park(
        self, step: int, *, sound: bool = True, why: str, capture: Capture | None = None
    ) -> NoReturn:
        """Leave the group for good. Save whenever asked, until the agent ends this process."""
        self.membership.group.cut()
        self.membership.group.cut_unit()
        self.saves.copier.wait()  # the copy does not need the group, and may be the newest save
        self.agent.send(wire.Parked(epoch=self.epoch, step=step, sound=sound, why=why))
        with self.meter.charging("idle", waiting=True):
            while True:
                save = self.agent.wait_save()
                if sound and save.step == step:
                    self.saves.slots.release()  # this rank trains no more
                    self.saves.stage(step, capture, whole=True)

    def fail(self, cause: Cause, message: str, traceback: str = "", *, fault: str = "") -> NoReturn:
        """Report to the agent why this worker cannot continue, and end the process."""
        self.saves.copier.wait()
        self.agent.send(
            wire.Failed(
                epoch=self.epoch,
                step=self.applied,
                cause=cause.value,
                message=message,
                traceback=traceback,
                fault=fault,
            )
        )
        self.agent.leave(EXIT_FAILED)

    def _tree(self) -> dict[str, Any]:
        assert self.checkpoint is not None
        return self.checkpoint.tree

    def _recorded_feeds(self) -> dict[str, feed.FeedRecord] | None:
        """The feeds in the checkpoint. None: it was written by a version that did not record feeds."""
        if self.checkpoint is None:
            return {}
        try:
            return feed.decode_records(self._tree())
        except codec.DecodeError as error:
            raise StateError(f"the checkpoint of step {self.applied}: {error}") from None

    def _restore_rest(self, tree: dict[str, Any], fetch: Callable[[str], torch.Tensor]) -> None:
        extra = sorted(set(tree["objects"]) - set(self.tracked.objects))
        if extra:
            self.note(
                f"the checkpoint also has {', '.join(extra)}, which the script does not track: "
                "it is ignored, and later checkpoints will lack it"
            )
        if feed.STATE_KEY not in tree and tree["seed"] != self.seed:
            self.note(
                f"everstep.run(seed=…) was {tree['seed']}, is {self.seed}: feeds that take their "
                "seed from it change their order"
            )
        self.windows = {k: tuple(v) for k, v in tree["windows"].items()}
        self.most_reductions = tree.get("most_reductions", 0)  # older versions do not record it
        # Older versions do not record these two, either. If they began otherwise, the script was edited.
        began, frozen = tree.get("frozen") or (None, [])
        if began == self._frozen_at_start:
            self.tracked.freeze(frozen)
        began, modes = tree.get("modes") or (None, [])
        if began == self._modes_at_start:
            self.tracked.set_modes(modes)
        run, stopped = tree.get("stopped") or ("", None)
        self._stopped = stopped if run == self.start.run else None  # a fork goes on
        cpu = torch.device("cpu")
        randomness.restore(state.decode(tree["random"], fetch, cpu))
