"""The cases to try: one for each write of the undisturbed plays and each moment. Pure functions."""

import ast
import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crash.lane import NotReached
from crash.shape import Shape, describe_difference

BEFORE, AFTER, LOST = "before", "after", "lost"
MOMENTS = (BEFORE, AFTER, LOST)
"""`before`: SIGKILL before the API server gets the write. `after`: SIGKILL once the write is done,
before the answer. `lost`: the write is done, but the operator stays alive and gets an error.
"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Write:
    """A write is identified by its content, not by its place in the order, which differs between runs."""

    title: str
    occurrence: int
    """Number among the writes with this title, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Case:
    scenario: str
    write: Write | None
    """None if the operator is not disturbed."""
    moment: str

    @property
    def name(self) -> str:
        """The name of the case and its job, which is the same in every run."""
        if self.write is None:
            return f"{self.scenario}-{self.moment}"
        digest = hashlib.sha256(f"{self.write.title} {self.write.occurrence}".encode())
        return f"{self.scenario}-{digest.hexdigest()[:6]}-{self.moment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """What the undisturbed plays of a scenario showed."""

    shape: Shape
    writes: tuple[Write, ...]
    """The writes that every play made."""
    seconds: float


def list_writes(titles: Sequence[str]) -> tuple[Write, ...]:
    counts = Counter(titles)
    return tuple(
        Write(title=title, occurrence=n)
        for title, count in sorted(counts.items())
        for n in range(1, count + 1)
    )


def merge(name: str, played: Sequence[Clean]) -> Clean:
    """Keep only the writes that every play made. A write that only some plays make (such as an
    intermediate status, which a slower run leaves out) cannot be struck in every run. If a title
    comes more often in one play than in another, only its first write is kept.
    """
    first, *others = played
    for other in others:
        if other.shape != first.shape:
            difference = describe_difference(first.shape, other.shape)
            raise NotReached(f"two undisturbed plays of {name} end differently:\n{difference}")
    counts = [Counter(write.title for write in clean.writes) for clean in played]
    common = [
        write
        for write in first.writes
        if all(write.title in count for count in counts)
        and (write.occurrence == 1 or len({count[write.title] for count in counts}) == 1)
    ]
    seconds = max(clean.seconds for clean in played)
    return Clean(shape=first.shape, writes=tuple(common), seconds=seconds)


def build_cases(clean: Mapping[str, Clean], seed: int) -> list[Case]:
    """One case for every write of every scenario at every moment, in a random order drawn from the
    seed.
    """
    cases = [
        Case(scenario=name, write=write, moment=moment)
        for name, found in sorted(clean.items())
        for write in found.writes
        for moment in MOMENTS
    ]
    random.Random(seed).shuffle(cases)
    return cases


def list_certain(cases: Sequence[Case]) -> list[Case]:
    """The cases of writes whose title comes once in a play. How often another write comes depends
    on the machine's load.
    """
    often = {(c.scenario, c.write.title) for c in cases if c.write and c.write.occurrence > 1}
    return [c for c in cases if c.write and (c.scenario, c.write.title) not in often]


def encode_cleans(cleans: Mapping[str, Clean]) -> dict[str, Any]:
    return {
        name: {
            "shape": repr(asdict(clean.shape)),
            "writes": [asdict(write) for write in clean.writes],
            "seconds": clean.seconds,
        }
        for name, clean in cleans.items()
    }


def decode_cleans(plan: Mapping[str, Any]) -> dict[str, Clean]:
    return {
        name: Clean(
            shape=Shape(**ast.literal_eval(found["shape"])),
            writes=tuple(Write(**write) for write in found["writes"]),
            seconds=found["seconds"],
        )
        for name, found in plan.items()
    }
