"""Whom an agent follows. Pure.

There is no election: a coordinator keeps the role as long as it is reachable, whatever its slot. If
there is none, agents that were in the newest epoch precede the others (they hold its state and
position), and among these the lowest slot comes first. Each waits a little for those before it, so
that normally only one takes the role.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep_agent.peers.messages import Levels, Who

TURN_SECONDS = 0.7
"""How long an agent waits for each agent that precedes it before it takes the role."""
HEIRS = 2
"""So many agents keep the run log read, because they may have to take the role at once: the coordinator
may be lost together with the first of them.
"""
DOUBT_SECONDS = 5.0
"""How long an agent waits if a peer still follows a coordinator that the agent cannot reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has the coordinator's role, and in which term: a new term needs everything again."""

    address: str
    """Empty: this agent."""
    term: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A peer's answer; `who` is None if it could not be reached."""

    slot: int
    attempt: int
    address: str
    who: Who | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`address` empty: none yet; `act`: take the role."""

    address: str
    act: bool
    reason: str


def choose_coordinator(
    me: Who, address: str, answers: Mapping[str, Answer], *, alone_for: float
) -> Choice:
    """`answers` by address, without this agent's own; `alone_for`: seconds since it last had a
    coordinator.
    """
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
        return Choice(
            address="", act=False, reason="this agent leaves, or the coordinator has just failed"
        )
    before = sum(1 for w in living.values() if w.candidate and _precedes(w, me))
    if alone_for < before * TURN_SECONDS:
        return Choice(address="", act=False, reason=f"{before} others come first")
    return Choice(
        address=address, act=True, reason="lowest living slot" if not before else "turn came"
    )


def choose_witness(answers: Mapping[str, Answer], *, known: int) -> str | None:
    """Address of a peer that was in a newer epoch than `known`; None if there is none."""
    newer = [(x.who.epoch, a) for a, x in answers.items() if x.who and x.who.epoch > known]
    return max(newer)[1] if newer else None


def list_heirs(published: Levels | None) -> list[str]:
    """Addresses of the members that would take the role next if the coordinator were lost."""
    epoch = published.epoch if published is not None else None
    if published is None or epoch is None or not epoch.live:
        return []
    members = sorted(epoch.members, key=lambda m: m.slot)
    return [m.address for m in members if m.address != published.address][:HEIRS]


def find_unreached(address: str, answers: Iterable[Answer]) -> str:
    """The address of a coordinator that another agent follows and that did not answer; empty: there is none."""
    living = {x.address: x.who for x in answers if x.who is not None}
    followed = {w.coordinator for w in living.values()} - {"", address, *living}
    return min(followed, default="")


def _precedes(other: Who, me: Who) -> bool:
    return (-other.epoch, other.slot) < (-me.epoch, me.slot)
