"""What there is to try: the writes of the undisturbed plays, and a case for each of them and each moment. Pure."""

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
"""SIGKILL before the API server hears of the write; once it is done and before the answer; done, and
the operator, alive, is told that it failed."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Write:
    """Told by what it writes, not by its place in the order, which differs between runs."""

    title: str
    occurrence: int
    """Among the writes of this title, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Case:
    scenario: str
    write: Write | None
    """None: nothing is done to the operator."""
    moment: str

    @property
    def name(self) -> str:
        """Also the job's. The same in every run."""
        if self.write is None:
            return f"{self.scenario}-{self.moment}"
        digest = hashlib.sha256(f"{self.write.title} {self.write.occurrence}".encode())
        return f"{self.scenario}-{digest.hexdigest()[:6]}-{self.moment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """The scenario undisturbed."""

    shape: Shape
    writes: tuple[Write, ...]
    """Those that every play of it made."""
    seconds: float


def list_writes(titles: Sequence[str]) -> tuple[Write, ...]:
    counts = Counter(titles)
    return tuple(
        Write(title=title, occurrence=n)
        for title, count in sorted(counts.items())
        for n in range(1, count + 1)
    )


def merge(name: str, played: Sequence[Clean]) -> Clean:
    """Of writes those that every play made: one that only some make (a status in between, which a slower
    moment leaves out) is no place at which every run can be struck. Of a title that comes more often in one
    play than in another, only the first.
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
    """Every write of every scenario at every moment, in an order that the seed draws."""
    cases = [
        Case(scenario=name, write=write, moment=moment)
        for name, found in sorted(clean.items())
        for write in found.writes
        for moment in MOMENTS
    ]
    random.Random(seed).shuffle(cases)
    return cases


def list_certain(cases: Sequence[Case]) -> list[Case]:
    """Of writes whose title comes once in a play: how often another comes depends on the machine's load."""
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
