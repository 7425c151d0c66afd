"""The run's seconds by category, summed over its agents. Pure.

Each agent counts its own seconds from the start of its container, and reports the sum. A
checkpoint's manifest holds the run's sum and, separately, what each agent had reported by then. A
new coordinator can thus replace an agent's old figure with its new one, and no second of an agent
that outlives a coordinator counts twice.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep_agent.peers.agent_report import AgentReport
from everstep_contract.manifest import AgentSeconds, Manifest

Id = tuple[int, int, int]
"""(slot, attempt, incarnation): one start of a container."""
Seconds = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentTime:
    settled: Seconds = field(default_factory=dict)
    """Of containers that have ended, and of former jobs."""
    by_agent: Mapping[Id, Seconds] = field(default_factory=dict)

    def update(self, reports: Iterable[AgentReport]) -> "SpentTime":
        """The newest figures of each agent. A container that had been replaced when the checkpoint
        was written is already part of `settled`.
        """
        newest = _newest_lives(self.by_agent)
        fresh = {
            r.id: r.seconds
            for r in reports
            if r.id in self.by_agent or r.id >= newest.get(r.slot, r.id)
        }
        return SpentTime(settled=self.settled, by_agent={**self.by_agent, **fresh})

    def total(self) -> dict[str, float]:
        return _add([self.settled, *self.by_agent.values()])

    def list_agents(self) -> tuple[AgentSeconds, ...]:
        """For the manifest: each slot's newest container, which may report again."""
        newest = set(_newest_lives(self.by_agent).values())
        return tuple(
            AgentSeconds(slot=id[0], attempt=id[1], incarnation=id[2], seconds=dict(seconds))
            for id, seconds in sorted(self.by_agent.items())
            if id in newest
        )


def read_spent_time(manifest: Manifest, *, same_job: bool) -> SpentTime:
    """The times as of a checkpoint. Agents of another job never report again, though slots have the
    same numbers.
    """
    if not same_job:
        return SpentTime(settled=manifest.seconds)
    by_agent = {(a.slot, a.attempt, a.incarnation): a.seconds for a in manifest.agents}
    held = _add(by_agent.values())
    settled = {k: max(0.0, v - held.get(k, 0.0)) for k, v in manifest.seconds.items()}
    return SpentTime(settled=settled, by_agent=by_agent)


def _newest_lives(ids: Iterable[Id]) -> dict[int, Id]:
    found: dict[int, Id] = {}
    for id in ids:
        found[id[0]] = max(id, found.get(id[0], id))
    return found


def _add(parts: Iterable[Seconds]) -> dict[str, float]:
    total: dict[str, float] = {}
    for seconds in parts:
        for name, spent in seconds.items():
            total[name] = total.get(name, 0.0) + spent
    return total
