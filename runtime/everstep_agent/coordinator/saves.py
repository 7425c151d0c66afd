"""The coordinator's saves: it collects parts from the agents and commits complete saves in order,
in the background.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from everstep_agent import logline
from everstep_agent.checkpoint import commit as committing
from everstep_agent.checkpoint import commit_rules
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator.background import Background
from everstep_agent.coordinator.pending_saves import Key, PendingSaves
from everstep_agent.coordinator.pins import Pins
from everstep_agent.coordinator.spent_time import SpentTime
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember
from everstep_agent.storage.errors import StoreError
from everstep_contract import levels, log

RETRY_SECONDS = 1.0
NOTES = 3
BACKLOG = 2
"""How many complete saves may wait for their commit before the pods keep newer ones in memory. With
one, a save that only the store refuses would hold up all that follow.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why the last commit failed."""

    level: levels.StorageError
    transient: bool
    since: float


class Saves:
    """At most one commit runs at a time. `on_commit` is called after each, on the event loop, with
    the commit and the slots that uploaded its chunks, by the chunks' digests.
    """

    def __init__(
        self,
        committer: committing.Committer,
        *,
        on_commit: Callable[[log.Commit, Mapping[str, int]], None],
        background: Background,
        line: logline.Log,
    ) -> None:
        self._committer = committer
        self.pins = Pins()
        self._pending = PendingSaves()
        self._on_commit = on_commit
        self._background = background
        self._line = line
        self._waits = logline.Once(line, "commit_waits")
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0
        self.trouble: Trouble | None = None
        self.notes: tuple[str, ...] = ()
        self.impossible = ""
        """Why no checkpoint of this job can be made: its ranks do not hold the same state."""
        self.disagreement: commit_rules.Disagree | None = None
        """Its ranks no longer hold the same values: all go back to the newest commit."""
        self.not_finite: tuple[int, str] = (0, "")
        """The step of the newest save, and why it was refused, if it held NaN or infinite values."""
        self.committed_at = time.monotonic()
        """Time of the newest commit, as far as known: without one, the time of taking the role."""

    def add(self, part: Part) -> None:
        self._note(*self.pins.ask(part.pins, part.step, self._committer.index))
        self._note(self._pending.add(part))

    def pending(self, epoch: int) -> list[int]:
        return self._pending.pending(epoch)

    def has_whole(self, epoch: EpochLevel, step: int) -> bool:
        """Whether the parts of a whole unit, which together are the full state, have arrived."""
        return self._pending.has_whole(epoch.number, step, epoch.mesh)

    def unsaved(self, epoch: int) -> frozenset[int]:
        return self._pending.unsaved(epoch)

    def why_given_up(self, epoch: int, step: int) -> str:
        return self._pending.why_given_up(epoch, step)

    def count_parts(self, epoch: int, step: int) -> int:
        return len({part.rank for part in self._pending.parts(epoch, step)})

    def drop_older(self, epoch: int, step: int) -> None:
        self._pending.drop_older(epoch, step)

    def restart(self, epoch: int, step: int) -> None:
        """Note that all ranks begin `epoch` with the state of the commit of `step`."""
        self.drop_older(epoch, step)
        self.disagreement, self.not_finite = None, (0, "")

    @property
    def age(self) -> float:
        """Seconds since the newest commit, as far as known."""
        return time.monotonic() - self.committed_at

    @property
    def busy(self) -> bool:
        return self._task is not None

    def pump(self, epoch: EpochLevel, applied: Mapping[int, int], spent: SpentTime) -> None:
        """Starts the commit of the newest complete save, if none is running and the epoch is claimed."""
        if self._task is None and not self._pending.pending(epoch.number):
            self._forget_trouble()  # the save whose commit failed is dropped: nothing waits for the store
        if self._task is not None or epoch.unclaimed or time.monotonic() < self._again_at:
            return
        for step in reversed(self._pending.pending(epoch.number)):
            found = commit_rules.decide_commit(
                self._pending.parts(epoch.number, step),
                epoch=epoch.number,
                step=step,
                world=epoch.world,
                applied=applied,
                mesh=epoch.mesh,
            )
            match found:
                case commit_rules.Ready():
                    work = self._commit(found.parts, epoch, spent)
                    self._task = self._background.start(work)
                    return
                case commit_rules.Drop():
                    self._give_up((epoch.number, step), found.reason, found.message)
                case commit_rules.NotFinite():
                    self._give_up((epoch.number, step), "NotFinite", found.message)
                    self.not_finite = step, found.message
                case commit_rules.Differ():
                    self._give_up((epoch.number, step), "RanksDiffer", found.message)
                    self.impossible = found.message
                case commit_rules.Disagree():
                    self._give_up((epoch.number, step), "ReplicasDiffer", found.message)
                    self.disagreement = found
                    return

    def find_backlog(self, epoch: EpochLevel) -> int:
        """As `EpochLevel.backlog`."""
        if self.trouble is None and not epoch.unclaimed:
            return 0
        steps = self.pending(epoch.number)
        complete = [s for s in steps if self.count_parts(epoch.number, s) == epoch.world]
        return max(complete) if len(complete) >= BACKLOG else 0

    async def _commit(self, parts: tuple[Part, ...], epoch: EpochLevel, spent: SpentTime) -> None:
        key = (parts[0].epoch, parts[0].step)
        started = time.monotonic()
        try:
            outcome = await self._committer.commit(
                parts,
                token=epoch.token,
                world=epoch.world,
                seconds=spent.total(),
                agents=spent.list_agents(),
                pins=self.pins.list_due(key[1], self._committer.index),
            )
        except StoreError as error:
            since = self.trouble.since if self.trouble else started
            self.trouble = Trouble(level=error.to_level(), transient=error.transient, since=since)
            self._again_at = time.monotonic() + RETRY_SECONDS
            self._waits.say(step=key[1], kind=error.kind, message=str(error))
        except commit_rules.BadSave as error:
            self._give_up(key, "BadSave", str(error))
        else:
            self._forget_trouble()
            self._settle(key, outcome, list_uploaders(parts, epoch.members), started)
        finally:
            self._task = None

    def _forget_trouble(self) -> None:
        self.trouble = None
        self._waits.passed()

    def _settle(
        self,
        key: Key,
        outcome: committing.Committed | committing.NotCommitted,
        uploaders: Mapping[str, int],
        started: float,
    ) -> None:
        if isinstance(outcome, committing.NotCommitted):
            self._give_up(key, outcome.reason, outcome.message)
            if outcome.newest is not None:
                self._on_commit(outcome.newest, {})
            return
        self._note(*self._pending.settle(key), *outcome.notes)
        self.pins.pinned(outcome.commit.pins)
        self._line.say(
            "committed",
            epoch=key[0],
            step=key[1],
            bytes=outcome.commit.bytes,
            pins=",".join(outcome.commit.pins),
            place=outcome.place,
            ms=round((time.monotonic() - started) * 1000),
        )
        self.committed_at, self.not_finite = time.monotonic(), (0, "")
        self._on_commit(outcome.commit, uploaders)

    def _give_up(self, key: Key, reason: str, message: str) -> None:
        self._pending.give_up(key, message)
        self._line.say("save_dropped", step=key[1], reason=reason, message=message)
        head = f"no checkpoint of step {key[1]}"
        self._note(message if message.startswith(head) else f"{head}: {message}")

    def _note(self, *texts: str) -> None:
        """Each text once: all ranks' parts may carry the same."""
        new = dict.fromkeys(t for t in texts if t and t not in self.notes)
        self.notes = (*self.notes, *new)[-NOTES:]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def list_uploaders(parts: Iterable[Part], members: Iterable[EpochMember]) -> dict[str, int]:
    """Digest → slot of the pod that uploaded the chunk."""
    slots = {rank: member.slot for member in members for rank in member.ranks.values()}
    return {c.digest: slots[p.rank] for p in parts if p.rank in slots for c in p.chunks}
