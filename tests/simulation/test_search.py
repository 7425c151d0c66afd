"""The search itself, on models of a few states."""

from dataclasses import dataclass, field

from simulation.protocol.rules import Move
from simulation.protocol.search import Bounds, search


@dataclass
class Graph:
    """A graph as a model: for each world, the worlds that follow it. The first of them needs no
    delay, each other one does.
    """

    next: dict[str, list[str]]
    bad: str = ""
    entered: list[str] = field(default_factory=list)

    def moves(self, world: str) -> list[Move]:
        return [Move("goes", world, to, to) for to in self.next.get(world, [])]

    def events(self, world: str) -> list[Move]:
        return []

    def check(self, before: str, move: Move) -> str:
        self.entered.append(move.after)
        return f"{move.after} was reached" if move.after == self.bad else ""

    def is_done(self, world: str) -> bool:
        return world == "end"


DETOUR = {"a": ["b", "c"], "b": ["c"], "c": ["d"], "d": ["end"]}
"""`c` is reached first as the second choice of `a`, which costs a delay, and then without a delay,
after `b`.
"""


def test_what_is_met_first_by_a_delay_is_visited_when_it_is_reached_without_one() -> None:
    found = search(Graph(DETOUR, bad="d"), "a", Bounds(delays=0, fair_every=0))
    assert found.broken == "d was reached"


def test_a_search_is_complete_when_all_that_its_delays_allow_was_visited() -> None:
    found = search(Graph(DETOUR), "a", Bounds(delays=0, fair_every=0))
    assert (found.complete, found.delays, found.states) == (True, 0, 4)
    assert found.finished == 1


def test_a_delay_reaches_what_no_order_without_one_does() -> None:
    graph = {"a": ["b", "x"], "b": ["end"], "x": ["end"]}
    assert not search(Graph(graph, bad="x"), "a", Bounds(delays=0, fair_every=0)).broken
    assert (
        search(Graph(graph, bad="x"), "a", Bounds(delays=1, fair_every=0)).broken == "x was reached"
    )


def test_a_search_that_is_stopped_by_its_states_is_not_complete() -> None:
    line = {str(n): [str(n + 1)] for n in range(100)}
    line["100"] = ["end"]
    found = search(Graph(line), "0", Bounds(delays=0, states=50))
    assert not found.complete
    assert found.states == 51


def test_a_run_that_never_ends_is_found() -> None:
    found = search(Graph({"a": ["b"], "b": ["a"]}), "a", Bounds(delays=0, fair_every=1))
    assert "no end" in found.broken
