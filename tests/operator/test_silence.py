"""Which nodes are silent, judged by the renewals of their leases. The test moves the clock."""

from collections.abc import Iterable
from typing import Any

import pytest

from everstep_operator.silence import Silence

LIST = 3.0
RENEWAL = 10.0
"""How often a kubelet renews its lease."""


def a_lease(node: str, renewed: float, duration: int = 40) -> dict[str, Any]:
    spec = {"renewTime": f"time {renewed}", "leaseDurationSeconds": duration}
    return {"metadata": {"name": node}, "spec": spec}


class Leases:
    """Lists every 3 s. Each living node renews its lease every 10 s, not at the same moment as others."""

    def __init__(self, nodes: int, duration: int = 40) -> None:
        self.silence, self.now = Silence(), 0.0
        self._every = RENEWAL * duration / 40
        self._duration = duration
        self._renewed = {f"node-{n}": -self._every * n / nodes for n in range(nodes)}

    def run(self, seconds: float, dead: Iterable[str] = (), *, listed: bool = True) -> None:
        until, dead = self.now + seconds, set(dead)
        while self.now + LIST <= until:
            self.now += LIST
            for node, last in self._renewed.items():
                if node not in dead:
                    self._renewed[node] = last + (self.now - last) // self._every * self._every
            if listed:
                self.note()

    def note(self) -> None:
        leases = [a_lease(n, at, self._duration) for n, at in self._renewed.items()]
        self.silence.note(leases, self.now)

    def silent(self) -> dict[str, float]:
        return self.silence.list_silent(self.now)


@pytest.mark.parametrize("nodes", [2, 5, 50])
@pytest.mark.parametrize("duration", [4, 40, 120])
def test_a_node_whose_lease_is_not_renewed_is_silent_and_no_other(
    nodes: int, duration: int
) -> None:
    leases = Leases(nodes, duration)
    for _ in range(40):
        leases.run(LIST)
        assert leases.silent() == {}
    died = leases.now
    leases.run(60.0, dead=["node-1"])
    (silence,) = leases.silent().items()
    assert silence[0] == "node-1"
    renewal = RENEWAL * duration / 40
    assert leases.now - died - LIST <= silence[1] <= leases.now - died + renewal


def test_a_renewal_ends_the_silence() -> None:
    leases = Leases(5)
    leases.run(60.0)
    leases.run(30.0, dead=["node-1"])
    assert set(leases.silent()) == {"node-1"}
    leases.run(LIST)
    assert leases.silent() == {}


@pytest.mark.parametrize("nodes", [1, 2, 5, 50])
def test_if_no_lease_is_renewed_the_api_server_is_at_fault(nodes: int) -> None:
    """With only one node, nobody can tell whether the node or the API server is at fault."""
    leases = Leases(nodes)
    leases.run(60.0)
    everyone = [f"node-{n}" for n in range(nodes)]
    for _ in range(40):
        leases.run(LIST, dead=everyone)
        assert leases.silent() == {}
    leases.run(RENEWAL, dead=everyone[1:])
    assert leases.silent() == {}, "the others need a moment until their next renewal"


def test_time_without_lists_counts_for_nobody() -> None:
    leases = Leases(5)
    leases.run(60.0)
    everyone = [f"node-{n}" for n in range(5)]
    leases.run(120.0, dead=everyone, listed=False)
    assert leases.silent() == {}
    leases.run(LIST, dead=everyone[1:])
    assert leases.silent() == {}
    leases.run(30.0, dead=["node-4"])
    ((node, seconds),) = leases.silent().items()
    assert node == "node-4"
    assert seconds <= RENEWAL + 2 * LIST + 30.0


def test_a_silence_that_is_known_goes_on_after_a_pause_of_the_lists() -> None:
    leases = Leases(5)
    leases.run(60.0)
    leases.run(30.0, dead=["node-1"])
    before = leases.silent()["node-1"]
    leases.run(30.0, dead=["node-1"], listed=False)
    assert leases.silent() == {}, "without lists nobody knows"
    leases.run(LIST, dead=["node-1"])
    assert before <= leases.silent()["node-1"] <= before + 2 * LIST


def test_a_node_that_was_silent_before_this_process_began_gets_the_whole_time() -> None:
    leases = Leases(5)
    leases.run(15.0, dead=["node-1"])
    assert leases.silent() == {}
    leases.run(15.0, dead=["node-1"])
    assert leases.silent() == {"node-1": 27.0}


def test_a_node_without_a_lease_is_not_silent() -> None:
    leases = Leases(5)
    leases.run(60.0)
    leases.run(30.0, dead=["node-1"])
    del leases._renewed["node-1"]
    leases.note()
    assert leases.silent() == {}
