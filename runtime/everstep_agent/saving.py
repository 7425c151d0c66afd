"""The coordinator's saves: parts come in from the agents, complete ones are committed, in order,
beside the training.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep_agent import logline, runlog
from everstep_agent.checkpoint import commit as committing
from everstep_agent.checkpoint import commit_rules
from everstep_agent.checkpoint.parts import Part, replaces
from everstep_agent.messages import EpochLevel
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import levels, log

RETRY_SECONDS = 1.0
LACKING = 4
"""So many saves that lack a part are kept: it may come after all."""
Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why the last commit did not come about."""

    level: levels.StorageError
    transient: bool
    since: float


class Saves:
    """Parts by (epoch, step); at most one commit runs at a time. `on_commit` is called after each,
    on the loop.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_log: runlog.RunLog,
        run: str,
        *,
        on_commit: Callable[[log.Commit], None],
        line: logline.Log,
    ) -> None:
        self._committer = committing.Committer(store, run_log, run)
        self._run_log = run_log
        self._parts: dict[Key, dict[int, Part]] = {}
        self._on_commit = on_commit
        self._line = line
        self._waits = logline.Once(line, "commit_waits")
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0
        self.trouble: Trouble | None = None
        self.notes: tuple[str, ...] = ()
        self._unsaved: set[Key] = set()

    def add(self, part: Part) -> None:
        held = self._parts.setdefault((part.epoch, part.step), {})
        known = held.get(part.rank)
        if not replaces(part, known):
            return
        held[part.rank] = part
        if part.problem and not (known and known.problem):
            note = f"no checkpoint of step {part.step}: rank {part.rank}: {part.problem}"
            self.notes = (*self.notes, note)[-3:]
            lacking = sorted(k for k in self._parts if self._lacks(k))
            self._parts = {k: v for k, v in self._parts.items() if k not in lacking[:-LACKING]}

    def _lacks(self, key: Key) -> bool:
        """There is a part that will not come, and none that has it all."""
        parts = self._parts[key].values()
        return any(p.problem for p in parts) and not any(p.whole for p in parts)

    def pending(self, epoch: int) -> list[int]:
        """Steps of this epoch of which parts are there, or may come, and no commit."""
        return sorted(k[1] for k in self._parts if k[0] == epoch and not self._lacks(k))

    def has_whole(self, epoch: int, step: int) -> bool:
        return any(p.whole for p in self._parts.get((epoch, step), {}).values())

    def unsaved(self, epoch: int) -> frozenset[int]:
        """Ranks whose save of the whole could not be committed and will not be."""
        return frozenset(rank for e, rank in self._unsaved if e == epoch)

    def _give_up(self, key: Key) -> None:
        parts = self._parts.pop(key, {})
        self._unsaved |= {(p.epoch, p.rank) for p in parts.values() if p.whole}

    @property
    def busy(self) -> bool:
        return self._task is not None

    def drop_older(self, epoch: int, step: int) -> None:
        """Nothing at or below a committed step, and nothing of an older epoch, is wanted any more."""
        self._parts = {k: v for k, v in self._parts.items() if k[0] >= epoch and k[1] > step}

    def pump(
        self, epoch: EpochLevel, applied: Mapping[int, int], seconds: Mapping[str, float]
    ) -> None:
        """Start the commit of the newest complete save, if none runs."""
        if self._task is not None or time.monotonic() < self._again_at:
            return
        for step in reversed(self.pending(epoch.number)):
            found = commit_rules.decide_commit(
                (p for p in self._parts[epoch.number, step].values() if not p.problem),
                epoch=epoch.number,
                step=step,
                world=epoch.world,
                applied=applied,
            )
            match found:
                case commit_rules.Ready():
                    self._task = asyncio.create_task(
                        self._commit(found.parts, epoch, dict(seconds))
                    )
                    return
                case commit_rules.Drop():
                    self._line.say(
                        "save_dropped", step=step, reason=found.reason, message=found.message
                    )
                    self._give_up((epoch.number, step))

    async def _commit(
        self, parts: tuple[Part, ...], epoch: EpochLevel, seconds: Mapping[str, float]
    ) -> None:
        key = (parts[0].epoch, parts[0].step)
        started = time.monotonic()
        try:
            outcome = await self._committer.commit(
                parts, token=epoch.token, world=epoch.world, seconds=seconds
            )
        except StoreError as error:
            since = self.trouble.since if self.trouble else started
            self.trouble = Trouble(level=error.to_level(), transient=error.transient, since=since)
            self._again_at = time.monotonic() + RETRY_SECONDS
            self._waits.say(step=key[1], kind=error.kind, message=str(error))
        except commit_rules.BadSave as error:
            self._line.say("save_dropped", step=key[1], reason="BadSave", message=str(error))
            self.notes = (*self.notes, f"a save of step {key[1]} was dropped: {error}")[-3:]
            self._give_up(key)
        else:
            self.trouble = None
            self._waits.passed()
            self._settle(key, outcome, started)
        finally:
            self._task = None

    def _settle(
        self, key: Key, outcome: committing.Committed | committing.NotCommitted, started: float
    ) -> None:
        if isinstance(outcome, committing.NotCommitted):
            self._give_up(key)
            self._line.say(
                "save_dropped", step=key[1], reason=outcome.reason, message=outcome.message
            )
            return
        self._parts.pop(key, None)
        self.notes = (*self.notes, *outcome.notes)[-3:]
        self.drop_older(*key)
        self._line.say(
            "committed",
            epoch=key[0],
            step=key[1],
            bytes=outcome.commit.bytes,
            place=outcome.place,
            ms=round((time.monotonic() - started) * 1000),
        )
        self._on_commit(outcome.commit)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
