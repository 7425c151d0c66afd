"""A story with more faults than a search can reach: its moves are named one by one."""

from simulation.protocol.membership import Membership
from simulation.protocol.rules import Move, Rules
from simulation.protocol.search import run_fairly
from simulation.protocol.world import World


class Led:
    def __init__(self, slots: int, faults: tuple[str, ...], rules: Rules) -> None:
        self.model = Membership(rules)
        self.world: World = self.model.start(slots, faults)

    def do(self, *moves: str) -> None:
        """Make the moves, each given by the beginning of its text. After each, deliver all levels
        and reports.
        """
        for text in moves:
            self.hold(text)
            while quick := [m for m in self.model.moves(self.world) if _is_quick(m)]:
                self._take(quick[0])

    def hold(self, *moves: str) -> None:
        """Make the moves without delivering levels or reports."""
        for text in moves:
            self._take(self._find(text))

    def can(self, text: str) -> bool:
        return any(str(m).startswith(text) for m in self._list())

    def end(self) -> str:
        """What breaks in a fair run from here on; empty: nothing, and the job reaches its end."""
        return run_fairly(self.model, self.world)

    def _find(self, text: str) -> Move:
        found = [m for m in self._list() if str(m).startswith(text)]
        assert found, f"{text!r} is none of {[str(m) for m in self._list()]}"
        return found[0]

    def _take(self, move: Move) -> None:
        assert self.model.check(self.world, move) == ""
        self.world = move.after

    def _list(self) -> list[Move]:
        return [*self.model.moves(self.world), *self.model.events(self.world)]


def _is_quick(move: Move) -> bool:
    return move.kind in ("is told", "hears")
