"""Gives a pin up: the checkpoint may then be retired like any other.

This needs no job, and works while one runs. The entry is appended at the next place of the log. A
coordinator that wanted the same place reads the entry and appends its own at the place after it.
"""

from dataclasses import dataclass

from everstep_agent.checkpoint.pin_rules import build_unpin
from everstep_agent.runlog.run_log import Lost, RunLog
from everstep_agent.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    run: str
    name: str
    epoch: int
    step: int
    before: bool
    """Whether the pin had been given up before."""


async def unpin(store: ObjectStore, name: str) -> Unpinned:
    """Give a pin up. Raises `NoPin`, and `StoreError` also if a place of the log is gone: the entry would
    fill it.
    """
    run_log = RunLog(store)
    await run_log.refresh()
    await run_log.check_whole()
    while (entry := build_unpin(run_log.index, name)) is not None:
        if not isinstance(await run_log.append(entry), Lost):
            break
    commit = run_log.index.find_pin(name)
    assert commit is not None
    return Unpinned(
        run=store.uri, name=name, epoch=commit.epoch, step=commit.step, before=entry is None
    )


def describe(found: Unpinned) -> str:
    """Describe the result for people."""
    if found.before:
        return f"{found.name} (step {found.step}) was unpinned before"
    return (
        f"unpinned {found.name}: the checkpoint of step {found.step} may be deleted after the next"
        " checkpoint of a job that writes this run"
    )
