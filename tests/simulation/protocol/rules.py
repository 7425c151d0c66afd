"""The protocol, or a variant of it that must fail; and what a move is."""

from dataclasses import dataclass
from typing import Any, NamedTuple

JOB = "job-uid"
TURN = "coordinates, as its turn has come"
"""A move that takes seconds."""


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
    """Each flag off is a variant. Compared by identity: it is part of the key of every cached decision."""

    steps: int = 2
    least: int = 1
    create_only: bool = True
    entries_stay: bool = True
    """Places of the log are never deleted."""
    proof_needed: bool = True
    """Rule 2: whom a claim leaves out is dead or declared gone."""
    claim_first: bool = True
    """A new epoch's members step after its claim stands."""
    incarnations_count: bool = True
    lives_count: bool = True
    know_before_ending: bool = True
    """A worker is ended for a newer epoch that is claimed, not for a round that knows nothing of its own."""
    catch_up: bool = True
    """A newcomer that coordinates hears of the newest epoch first, and takes up what still lives of it."""
    saves_on_chain: bool = True
    """A staged save is committed under a later claim only if that one's chain holds it."""
    state_on_chain: bool = True
    """A member of a new epoch begins with what its claim goes on from, not with what it held."""
    ask_first: bool = True
    """Who stops the job, or lets a pod go, reads the log first and hears who may hold what is not saved."""
    hear_out: bool = True
    """Before it stops the job, who has just come over to it may answer."""
    look_again: bool = True
    """An epoch whose claim is heard of late begins only if no newer claim stands."""
