"""The plan of a storm, which depends on its seed alone. Pure functions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

OF_A_SLOT = (
    "kill worker",
    "stop worker shortly",
    "stop worker until it counts as hung",
    "kill agent",
    "stop agent shortly",
    "stop agent until it counts as silent",
    "kill container",
    "lose node",
    "cut network shortly",
    "cut network until peers are silent",
    "cut network for good",
    "leave",
    "sigterm",
    "declare gone",
)
OF_THE_JOB = ("store hangs", "store refuses", "suspend and resume", "edit")
KINDS = OF_A_SLOT + OF_THE_JOB
BRIEF = (
    "kill worker",
    "stop worker shortly",
    "kill agent",
    "stop agent shortly",
    "kill container",
    "lose node",
    "cut network shortly",
    "leave",
    "sigterm",
    "store hangs",
    "store refuses",
    "edit",
)
"""Faults for which no member must wait for a limit of many seconds."""
HURTS = frozenset(
    {
        "kill worker",
        "stop worker until it counts as hung",
        "kill agent",
        "kill container",
        "lose node",
        "cut network for good",
        "declare gone",
    }
)
"""Faults after which the struck member may lose its state. After other faults no member may lose any."""
SECONDS = {
    "stop worker shortly": (0.5, 2.0),
    "stop agent shortly": (0.5, 3.0),
    "stop agent until it counts as silent": (10.0, 14.0),
    "cut network shortly": (0.5, 4.0),
    "cut network until peers are silent": (10.0, 14.0),
    "store hangs": (2.0, 6.0),
    "store refuses": (2.0, 6.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    kind: str
    slot: int | None
    """None if the job is struck, not a member."""
    after: float
    """Seconds from the beginning of its round."""
    seconds: float
    """How long it lasts, if the plan chooses that; otherwise 0."""


Round = tuple[Strike, ...]
"""Strikes that overlap; the next round begins when the job has taken new steps."""


def draw(seed: int, count: int, rounds: int, kinds: Sequence[str] = KINDS) -> tuple[Round, ...]:
    """Draw two strikes for each round, on different members. Every kind comes once before any kind
    comes again.

    At least one member of each round is not struck, so the state that it holds must not be lost.
    Therefore `count` must be 3 or more.
    """
    dice = random.Random(seed)
    deck: list[str] = []
    plan = []
    for _ in range(rounds):
        slots = dice.sample(range(count), 2)
        if len(deck) < 2:
            deck += dice.sample(list(kinds), len(kinds))
        plan.append(tuple(_strike(dice, deck.pop(0), slots.pop()) for _ in range(2)))
    return tuple(plan)


def _strike(dice: random.Random, kind: str, slot: int) -> Strike:
    low, high = SECONDS.get(kind, (0.0, 0.0))
    return Strike(
        kind=kind,
        slot=slot if kind in OF_A_SLOT else None,
        after=round(dice.uniform(0.0, 1.0), 2),
        seconds=round(dice.uniform(low, high), 2),
    )


def describe(plan: Sequence[Round]) -> str:
    lines = []
    for number, strikes in enumerate(plan, 1):
        for s in strikes:
            where = "" if s.slot is None else f" at slot {s.slot}"
            lasts = f" for {s.seconds} s" if s.seconds else ""
            lines.append(f"  round {number}, after {s.after} s: {s.kind}{where}{lasts}")
    return "\n".join(lines)
