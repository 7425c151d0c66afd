"""Does what a coordinator and its agents do: restores the newest checkpoint that is intact."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import Fetched, Fetcher
from everstep_agent.checkpoint.tiers import NearTier
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import ObjectStore
from everstep_contract.log import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    commit: Commit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    fetched: Fetched | None
    skipped: tuple[Skipped, ...]


async def fetch(
    store: ObjectStore,
    commit: Commit,
    folder: Path,
    *,
    memory: MemoryTier | None = None,
    nearer: Sequence[NearTier] = (),
) -> Fetched:
    return await Fetcher(store, memory or MemoryTier(folder), nearer).fetch(commit, folder)


async def restore_newest(store: ObjectStore, log: RunLog, folder: Path) -> Restored:
    skipped: list[Skipped] = []
    for commit in log.index.resumable():
        try:
            fetched = await fetch(store, commit, folder)
        except Broken as error:
            skipped.append(Skipped(commit=commit, reason=str(error)))
        else:
            return Restored(fetched=fetched, skipped=tuple(skipped))
    return Restored(fetched=None, skipped=tuple(skipped))
