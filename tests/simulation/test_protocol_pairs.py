"""The long part of the protocol's search: it exhausts every pair of faults. It continues where an
earlier run stopped.
"""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from finished import ROOT, Finished, digest_of
from simulation.protocol.membership import KINDS, Membership
from simulation.protocol.rules import Rules
from simulation.protocol.search import Bounds, Found, search

pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]
SECONDS = float(os.environ.get("EVERSTEP_PROTOCOL_PAIRS_SECONDS", "840"))
"""CPU seconds of this process."""
STATES = int(os.environ.get("EVERSTEP_PROTOCOL_PAIRS_STATES", "5000000"))
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
FAIR_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    slots: int
    delays: int
    steps: int
    share: float
    """Share of the total time. A round that is too large must leave some time to the next one,
    which also gets the time that earlier rounds did not use.
    """
    first_seconds: float
    """Seconds for each pair at first; pairs that need more are tried again with more."""
    at_least: int
    """Number of pairs that must be exhausted when the time is up, including those of earlier runs.
    """
    in_place: bool = False
    """Whether the survivors of a loss continue in place."""
    newcomers: bool = False
    """Whether lost ranks are replaced while the others continue."""

    @property
    def name(self) -> str:
        how = ", in place" if self.in_place else ""
        how += " with newcomers" if self.newcomers else ""
        return f"{self.slots} slots, {self.delays} delays, {self.steps} steps{how}"


ALL = len(PAIRS)
ROUNDS = (
    Round(slots=2, delays=0, steps=2, share=0.25, first_seconds=5, at_least=ALL),
    Round(slots=2, delays=0, steps=2, share=0.15, first_seconds=5, at_least=ALL, in_place=True),
    Round(
        slots=2,
        delays=0,
        steps=2,
        share=0.25,
        first_seconds=5,
        at_least=ALL,
        in_place=True,
        newcomers=True,
    ),
    Round(slots=3, delays=0, steps=2, share=0.2, first_seconds=5, at_least=44),
    Round(slots=3, delays=1, steps=1, share=0.15, first_seconds=15, at_least=12),
)
"""Searched in this order. With one delay a pair on three slots has thirty times as many states as
with none.
"""


def test_each_pair_of_faults_breaks_no_invariant() -> None:
    finished = Finished("protocol", digest_of(loaded_files()))
    until, sizes = time.process_time(), dict.fromkeys(PAIRS, 0)
    for round_ in ROUNDS:
        until += round_.share * SECONDS
        exhaust(round_, finished, sizes, until)
    counts = {r: sum(case(r, pair) in finished for pair in PAIRS) for r in ROUNDS}
    for round_, count in counts.items():
        print(f"{round_.name}: {count} of {len(PAIRS)} pairs exhausted")
    missing = [f"{r.name}: {n} < {r.at_least}" for r, n in counts.items() if n < r.at_least]
    assert not missing, f"{missing}; run it again, it goes on from {finished.path}"


def exhaust(
    round_: Round, finished: Finished, sizes: dict[tuple[str, str], int], until: float
) -> None:
    """Exhaust the pairs, the small ones first, by the sizes that the round before found. Each pair
    has the same time limit, which grows from pass to pass.
    """
    share = round_.first_seconds
    waiting = [pair for pair in PAIRS if case(round_, pair) not in finished]
    waiting.sort(key=lambda pair: sizes[pair])
    too_large: list[tuple[str, str]] = []
    while waiting and time.process_time() < until:
        for pair in waiting:
            left = until - time.process_time()
            found = explore(round_, pair, min(share, left)) if left > 0 else Found()
            sizes[pair] = found.states + (0 if found.complete else STATES)
            if found.complete:
                finished.add(case(round_, pair))
            elif found.states > STATES:
                too_large.append(pair)
        waiting = [p for p in waiting if case(round_, p) not in finished and p not in too_large]
        share *= 6
    if too_large:
        print(f"{round_.name}: {too_large} have more than {STATES} states")


def explore(round_: Round, pair: tuple[str, str], seconds: float) -> Found:
    rules = Rules(steps=round_.steps, in_place=round_.in_place, newcomers=round_.newcomers)
    model = Membership(rules)
    bounds = Bounds(delays=round_.delays, states=STATES, seconds=seconds, fair_every=FAIR_EVERY)
    found = search(model, model.start(round_.slots, pair), bounds)
    end = "exhausted" if found.complete else "not exhausted"
    spent = f"{time.process_time():.0f} s of CPU so far"
    text = f"{found.states} states, {found.fair} fair runs, {end}; {spent}"
    print(f"{case(round_, pair)}: {text}", flush=True)
    again = f"EVERSTEP_PROTOCOL_PAIRS_SECONDS={SECONDS} does it again"
    assert not found.broken, "\n".join([found.broken, again, *found.story])
    return found


def case(round_: Round, pair: tuple[str, str]) -> str:
    return f"{round_.name}, {' and '.join(pair)}"


def loaded_files() -> list[Path]:
    """The product's and the model's modules that a search uses, whatever other tests of this run have imported."""
    show = (
        "import sys\n"
        "import simulation.protocol.membership, simulation.protocol.search\n"
        "ours = [m for n, m in sys.modules.items() if n.startswith(tuple(sys.argv[1:]))]\n"
        "print(*(m.__file__ for m in ours if getattr(m, '__file__', None)))"
    )
    ours = ("everstep_agent", "everstep_contract", "simulation.protocol")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.check_output([sys.executable, "-c", show, *ours], env=environ, text=True)
    return sorted(Path(name).relative_to(ROOT) for name in found.split())
