"""Scopes outside the step: `job.evaluate`, `job.pause`, `job.sum`. Each has its own time limit, marks
the step as applied, and says whether the loss of a rank restarts all ranks meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from everstep import boundary
from everstep.errors import Misuse
from everstep.session import Session
from everstep_contract.position import Where


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """A scope outside the step. `limit`: in seconds; 0: the default of the scope."""

    where: Where
    category: str
    limit: float = 0.0

    @property
    def apart(self) -> bool:
        """Whether the loss of a rank restarts all ranks."""
        return self.where is not Where.PAUSE


class Asides:
    """The scopes of one worker."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.outside = Where.STARTUP
        """The scope between two steps and after the last one. Its time limit applies there."""
        self._open: list[Aside] = []
        """The scopes that have begun and not ended, the innermost last."""
        self._uneven: set[Aside] = set()
        """Evaluations in which some ranks have more batches than others."""
        self._evaluated = False
        """The script has evaluated in this step, and may hold a part of the result."""

    @contextmanager
    def begin(self, where: Where, category: str, limit: float = 0.0) -> Iterator[Aside]:
        """A scope outside the step, with its own time limit. In an evaluation each rank may hold a
        part of one result, so the loss of a rank restarts all ranks. In a pause there is no such
        result.
        """
        session = self._session
        if session.step is not None:
            boundary.mark_applied(session, session.step, at_once=True)
        inside = Aside(where, category, limit)
        if inside.apart:
            self._go_apart(f"its script is in job.{category}")
        self._open.append(inside)
        self.enter_innermost()
        try:
            yield inside
        finally:
            if inside in self._open:  # else it has ended with its step
                self._open.remove(inside)
                self.enter_innermost()
                if inside.apart:
                    self._end_apart()

    def require_open(self, evaluation: Aside) -> None:
        """Raises `Misuse` if the evaluation has ended with its step: its share was planned for the
        ranks of then.
        """
        if evaluation not in self._open:
            raise Misuse(
                "job.evaluate: a further batch was taken after the step in which the evaluation began. It ended with "
                "that step: take all its batches there, or call job.evaluate again"
            )

    def note_uneven(self, evaluation: Aside) -> None:
        """Some ranks have more batches of this evaluation than others."""
        self._uneven.add(evaluation)

    def require_even(self) -> None:
        """Raises `Misuse` if ranks may call `job.sum` as often as they have batches, and some have more."""
        if self._uneven.intersection(self._open):
            raise Misuse(
                "job.sum within the loop over job.evaluate: some ranks have more batches than others, so their last "
                "calls would meet what the others sum next. Add up in the loop, and call job.sum once after it (after "
                ".close(), if the script does not take all batches)"
            )

    def enter_innermost(self) -> None:
        """Enter the scope that began last of those that have not ended; without one, the step."""
        back = Where.STEP if self._session.step is not None else self.outside
        now = self._open[-1] if self._open else Aside(back, back.name.lower())
        self._session.meter.enter(now.where, category=now.category, limit=now.limit)

    @property
    def _in_steps(self) -> bool:
        return self._session.settled and not self._session.finished

    def _go_apart(self, why: str) -> None:
        if self._in_steps:
            with self._session.meter.charging("wait", waiting=True):
                self._session.membership.go_apart(why)

    def _end_apart(self) -> None:
        apart = self._evaluated or any(one.apart for one in self._open)
        if self._in_steps and not apart:
            self._session.membership.set_apart("")

    def stay_apart(self, evaluation: Aside) -> None:
        """An evaluation is over. If its step is not, the script may hold a part of the result."""
        self._evaluated = self._evaluated or evaluation in self._open

    def end_all(self) -> None:
        """The step is over, and with it each evaluation that the script has not ended, and what it
        does with the results: until then each rank holds a part of them.
        """
        self.forget()
        self._evaluated = False
        self._end_apart()

    def forget(self) -> None:
        """Forget the scopes that have not ended."""
        self._open.clear()
        self._uneven.clear()
