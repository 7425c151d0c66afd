"""Whom an agent follows. Pure.

Holding the role is a matter of being asked: who coordinates goes on doing so while it is reachable,
wherever its slot stands. When nobody does, agents that were in the newest epoch go before those
that were in none (they hold state and its position), and within these the lowest slot; each waits a
little for those before it, so that normally only one proposes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep_agent.messages import Who

TURN_SECONDS = 0.7
DOUBT_SECONDS = 5.0
"""How long the word of a peer that still follows somebody, whom we cannot reach, holds us back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one peer said when it was asked; `who` is None if it could not be reached."""

    slot: int
    attempt: int
    address: str
    who: Who | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`address` empty: nobody yet; `act`: take the role."""

    address: str
    act: bool
    reason: str


def choose_coordinator(
    me: Who, address: str, answers: Mapping[str, Answer], *, alone_for: float
) -> Choice:
    """`answers` by address, without our own; `alone_for`: seconds since we last knew a coordinator."""
    living = {a: x.who for a, x in answers.items() if x.who is not None}
    acting = [(w.slot, a) for a, w in living.items() if w.acting]
    if me.acting and not any(_precedes(living[a], me) for _, a in acting):
        return Choice(address=address, act=True, reason="Acting")
    if acting:
        newest = max(living[a].epoch for _, a in acting)
        slot, chosen = min((s, a) for s, a in acting if living[a].epoch == newest)
        return Choice(address=chosen, act=False, reason=f"slot {slot} coordinates")
    if alone_for < DOUBT_SECONDS and any(w.coordinator for w in living.values()):
        return Choice(address="", act=False, reason="a peer still follows a coordinator")
    if not me.candidate:
        return Choice(address="", act=False, reason="leaving; others will propose")
    before = sum(1 for w in living.values() if w.candidate and _precedes(w, me))
    if alone_for < before * TURN_SECONDS:
        return Choice(address="", act=False, reason=f"{before} others go first")
    return Choice(
        address=address, act=True, reason="lowest living slot" if not before else "turn came"
    )


def choose_witness(answers: Mapping[str, Answer], *, known: int) -> str | None:
    """Address of a peer that was in a newer epoch than the one that we know of; None: nobody was."""
    newer = [(x.who.epoch, a) for a, x in answers.items() if x.who and x.who.epoch > known]
    return max(newer)[1] if newer else None


def _precedes(other: Who, me: Who) -> bool:
    return (-other.epoch, other.slot) < (-me.epoch, me.slot)
