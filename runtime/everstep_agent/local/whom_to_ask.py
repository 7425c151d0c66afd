"""Which agents the launcher sends `wanted` to in a period. Pure.

Every agent must know its peers without help from another agent, so each receives every revision.
The coordinator's answer alone shows the state of the job.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from everstep_contract import levels

REPEAT_SECONDS = 4.0
"""Seconds between two rounds in which all agents are asked although nothing is new."""
OLD_MS = 2500
"""An answer that is based on older reports of the job's agents does not show the job's current
state.
"""


class Agent(Protocol):
    @property
    def slot(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def address(self) -> str: ...


A = TypeVar("A", bound=Agent)


def choose_agents(
    agents: Sequence[A],
    told: Mapping[str, int],
    newest: levels.Seen,
    *,
    revision: int,
    since_round: float,
) -> list[A]:
    """The agents that lack the newest revision, and the coordinator's. All agents if the last round
    was at least `REPEAT_SECONDS` ago, or if the coordinator's answer does not show the job's
    current state.

    Args:
        told: address → the revision that its agent has confirmed.
        newest: the newest answer.
        since_round: seconds since all agents were last asked.
    """
    lead = newest.coordinator
    place = (lead.slot, lead.attempt) if lead is not None else None
    coordinators = [a for a in agents if (a.slot, a.attempt) == place]
    shows = newest.running and newest.age_ms < OLD_MS
    if since_round >= REPEAT_SECONDS or not coordinators or not shows:
        return list(agents)
    return [a for a in agents if a in coordinators or told.get(a.address) != revision]
