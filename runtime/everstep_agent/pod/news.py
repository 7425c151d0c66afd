"""What the parts of a pod tell its agent: that there is something new, or that one of their tasks met a bug."""

import asyncio


class News:
    def __init__(self) -> None:
        self.to_report = asyncio.Event()
        """Set whenever the pod's report has news."""
        self.to_look = asyncio.Event()
        """Set whenever `Pod.look` may find something to do before it is due."""
        self._error: BaseException | None = None

    def touch(self) -> None:
        self.to_report.set()
        self.to_look.set()

    def fail(self, error: BaseException) -> None:
        """A task has raised this: a bug in Everstep."""
        self._error = self._error or error
        self.to_look.set()

    def raise_failure(self) -> None:
        """Raise what a task has raised first, so that the agent ends."""
        if self._error is not None:
            raise self._error
