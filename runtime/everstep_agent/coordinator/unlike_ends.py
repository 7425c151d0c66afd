"""Whether the scripts of all ranks end after the same step. Pure.

If one has ended and another trains on, that one waits in its next sum, and nobody will ever join it there.
"""

from collections.abc import Iterable

from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel


def describe_unlike_ends(epoch: EpochLevel, reports: Iterable[AgentReport]) -> str:
    """Which rank has ended and which one waits for it in a sum; empty: there is no such pair."""
    ranks = {m.ranks[w.local]: w for m, r in list_inside(epoch, reports) for w in r.workers}
    ended = {n: w.applied for n, w in sorted(ranks.items()) if w.state is State.FINISHED}
    waiting = [
        n
        for n, w in sorted(ranks.items())
        if w.state is State.TRACKED and w.waiting and w.sums is not None
    ]
    late = [n for n in waiting if any(step <= ranks[n].applied for step in ended.values())]
    if not late:
        return ""
    first = next(iter(ended))
    return (
        f"the script of rank {first} has ended after step {ended[first]}, and rank {late[0]} waits for it in a "
        f"sum after step {ranks[late[0]].applied}: every rank must reach `until`, or call job.stop, in the same step"
    )
