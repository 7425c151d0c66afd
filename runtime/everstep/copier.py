"""Work beside the next step: the copy for a save, until the step changes what is copied."""

import queue
import threading
from collections.abc import Callable

Rest = Callable[[], None]
Work = Callable[[], Rest | None]
"""It reads what a step is about to change; the rest that it returns does not."""


class Copier:
    """One thread, one piece of work at a time. The thread stays: to start one would wait for it."""

    def __init__(self) -> None:
        self._held: Work | None = None
        self._given = queue.SimpleQueue[Work]()
        self._has_read, self._idle = threading.Event(), threading.Event()
        self._has_read.set()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def hold(self, work: Work) -> None:
        """Take the next piece of work, to be begun by `begin` or `wait`. Raises what the last has raised."""
        self.wait()
        self._held = work

    def begin(self) -> None:
        """Begin what is held, if anything is."""
        work, self._held = self._held, None
        if work is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-copy", daemon=True)
            self._thread.start()
        self._has_read.clear()
        self._idle.clear()
        self._given.put(work)

    def wait_until_read(self) -> None:
        """Until nothing is held, and only a rest is under way. Raises what the work has raised."""
        self.begin()
        self._has_read.wait()
        self._raise()

    def wait(self) -> None:
        """Until nothing is held or under way. Raises what the work has raised."""
        self.begin()
        self._idle.wait()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            self._do(self._given.get())

    def _do(self, work: Work) -> None:
        """Apart, so that nothing of the work is kept once it is done."""
        try:
            rest = work()
            self._has_read.set()
            if rest is not None:
                rest()
        except BaseException as error:
            self._error = error
        self._has_read.set()
        self._idle.set()
