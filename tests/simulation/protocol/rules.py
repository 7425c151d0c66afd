"""The rules of the protocol, or of a variant that must fail; and the type of a move."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

JOB = "job-uid"
TURN = "coordinates, as its turn has come"
"""A move that takes seconds."""


BACK = "answers again"


class Move(NamedTuple):
    kind: str
    who: Any
    whom: Any
    after: Any

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:3]

    def __str__(self) -> str:
        who = "" if self.who is None else f"{self.who} "
        return f"{who}{self.kind}" + ("" if self.whom is None else f" {self.whom}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """The protocol's rules; each flag that is off makes a variant. Compared by identity, because
    they are part of the key of every cached decision.
    """

    steps: int = 2
    least: int = 1
    create_only: bool = True
    entries_stay: bool = True
    """Places of the log are never deleted."""
    proof_needed: bool = True
    """Rule 2: each member that a claim leaves out is dead or declared gone."""
    claim_first: bool = True
    """A new epoch's members step only after its claim is in the log."""
    incarnations_count: bool = True
    lives_count: bool = True
    know_before_ending: bool = True
    """A worker is ended for a newer epoch that is claimed, not for a round whose coordinator does
    not know of the worker's epoch.
    """
    catch_up: bool = True
    """A newcomer that takes the coordinator's role first hears of the newest epoch, and adopts what
    survives of it.
    """
    saves_on_chain: bool = True
    """A staged save is committed under a later claim only if that claim's chain contains it."""
    state_on_chain: bool = True
    """A member of a new epoch begins with the state from which its claim continues, not with the
    state that it held.
    """
    ask_first: bool = True
    """Before a coordinator stops the job or lets a pod go, it reads the log and hears from the pods
    that may hold unsaved state.
    """
    hear_out: bool = True
    """Before a coordinator stops the job, it waits for the answer of a pod that has just begun to
    follow it.
    """
    in_place: bool = False
    """The survivors of a loss continue without a restart."""
    newcomers: bool = False
    """Lost ranks are replaced while the others continue: newcomers join in place."""
    take_first: bool = True
    """A newcomer is claimed only once it holds the state of the boundary at which all hold."""
    sums_wait: bool = True
    """After the boundary at which newcomers join, no sum completes before the next epoch."""
    leave_held: bool = True
    """A member that leaves while others join ends only once all hold at their boundary, or when its notice ends."""
    silence_is_death: bool = False
    """A variant: members that are out of reach count as lost."""
    yields_expire: bool = True
    """A pod may be left out only while the claim that the operator knew of is the newest."""
    yields_are_of_silent: bool = True
    """A pod that may be left out but still reports is not left out."""
    extend_commits: bool = True
    """Survivors continue in place only if their state extends the newest commit."""
    know_commits: bool = True
    """An epoch that continues in place knows the newest commit of the log, whoever made it."""
    join_first: bool = True
    """Survivors join the new epoch before it is claimed. From then on they enter no epoch with a
    lower number.
    """
    hold_first: bool = True
    """Survivors leave their group before they report how far they are."""
    step_first: Callable[..., str] | None = None
    """Why a shrink in place must be claimed before its first step (`step_first.py`); None: as the
    runtime decides.
    """
    newcomers_claim_first: bool = True
    """An epoch with newcomers is claimed before its first step."""
    named_stay: bool = True
    """An epoch ends no worker that it names: a worker that cannot enter it keeps its state until
    that is saved.
    """
    log_spares_named: bool = True
    """A coordinator that knows an epoch only from its claim in the log does not end the workers
    that the claim names.
    """
    leave_empty: bool = True
    """A coordinator that goes back to the former epoch does not count as behind because of a pod
    that was in an epoch that never began, and that holds nothing of it.
    """
    commit_claimed: bool = True
    """Nothing of an epoch is committed before its claim."""
    by_token: bool = True
    """Survivors join one coordinator's epoch, not any epoch of that number."""
    look_again: bool = True
    """If a coordinator learns late that its own claim is in the log, the epoch begins only if there
    is no newer claim.
    """
