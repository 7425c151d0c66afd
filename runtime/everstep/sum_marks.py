"""Shows on the worker's page how far this rank is with the sums of a reduction."""

from everstep_contract.position import PositionPage


class SumMarks:
    """Each launch of sums is a *round* of its own. Late reports of gloo's thread
    about a former round are ignored.

    Args:
        page: None: nothing is written, for tests.
    """

    def __init__(self, page: PositionPage | None = None) -> None:
        self._page = page
        self._round = 0
        self._buckets = 0

    def begin(self, buckets: int) -> None:
        """Begin a reduction, or begin it again in another group."""
        self._round, self._buckets = self._round + 1, buckets
        self.join(0)

    def join(self, launched: int) -> None:
        """Show how many of the buckets and the vector are launched."""
        if self._page:
            self._page.join_sums(self._round, self._buckets, launched)

    def complete(self, round: int, complete: int) -> None:
        """Show how many of the buckets are complete; from any thread."""
        if self._page:
            self._page.complete_sums(round, complete)

    @property
    def round(self) -> int:
        return self._round

    def end(self) -> None:
        """Show that no reduction is under way."""
        if self._page:
            self._page.leave_sums()
