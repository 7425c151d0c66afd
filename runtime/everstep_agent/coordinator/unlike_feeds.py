"""Whether the scripts of a job's ranks have made the same feeds. Pure.

All ranks have to draw the same samples in the same order, and each computes its share. If their data
differ, samples are lost and used twice, and nothing else would tell.
"""

from collections.abc import Iterable

from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_contract import feed
from everstep_contract.layout import name_ranks


def describe_unlike_feeds(epoch: EpochLevel, reports: Iterable[AgentReport]) -> str:
    """How the first feed differs that is not the same on all ranks; empty: none does."""
    found: dict[str, dict[str, list[int]]] = {}
    for member, report in list_inside(epoch, reports):
        for worker in report.workers:
            for name, settings in worker.feeds.items():
                ranks = found.setdefault(name, {}).setdefault(settings, [])
                ranks.append(member.ranks[worker.local])
    for name, forms in sorted(found.items()):
        if len(forms) > 1:
            told = "; ".join(f"{form} on {name_ranks(sorted(r))}" for form, r in forms.items())
            split = "; make a random split in main, where all ranks draw the same numbers"
            return (
                f"job.batches, feed {name}: the ranks differ: {told}. Give all pods the same data and the same "
                f"script{split if feed.INDICES in told else ''}"
            )
    return ""
