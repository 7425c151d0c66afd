"""Pinned checkpoints, as the run log records them. Pure.

A commit carries the names under which it is pinned, so no retire can come between the two. A
`retire` entry can remove such a name.
"""

from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.levels import Pinned
from everstep_contract.log import Retire


class NoPin(ValueError):
    """No checkpoint is pinned under that name."""


def build_unpin(log: LogIndex, name: str) -> Retire | None:
    """The entry that removes this name; None: it was removed before.

    The entry has the newest claim's token. It removes a name and no state, so it need not come from
    a member of that claim.

    Raises:
        NoPin: the run has no such name. The message lists the names that it has.
    """
    claim = log.newest_claim
    if log.find_pin(name) is None or claim is None:
        known = ", ".join(sorted(log.pins)) or "none"
        raise NoPin(f"no checkpoint is pinned as {name!r}; pinned are: {known}")
    return (
        Retire(epoch=claim.epoch, token=claim.token, unpins=(name,)) if name in log.pins else None
    )


def find_pinned(name: str, log: LogIndex) -> Pinned | None:
    """The checkpoint that is or was pinned under this name; None: there is none yet."""
    commit = log.find_pin(name)
    if commit is None:
        return None
    return Pinned(
        name=name,
        epoch=commit.epoch,
        step=commit.step,
        manifest=commit.manifest,
        kept=name in log.pins,
    )
