"""Work in parallel with the next step, such as copying for a save what that step will change."""

import queue
import threading
from collections.abc import Callable

Rest = Callable[[], None]
Work = Callable[[], Rest | None]
"""Reads what a step is about to change. The rest that it returns does not."""


class Copier:
    """One thread that does one piece of work at a time. The thread is kept, because
    starting one means waiting for it.
    """

    def __init__(self) -> None:
        self._held: Work | None = None
        self._given = queue.SimpleQueue[Work]()
        self._has_read, self._idle = threading.Event(), threading.Event()
        self._has_read.set()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def hold(self, work: Work) -> None:
        """Accept the next piece of work, which `begin` or `wait` starts. Raises what the last one raised."""
        self.wait()
        self._held = work

    def begin(self) -> None:
        """Start the work that is held, if there is any."""
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
        """Wait until nothing is held and at most a rest is still running. Raises what the work raised."""
        self.begin()
        self._has_read.wait()
        self._raise()

    def wait(self) -> None:
        """Wait until nothing is held or running. Raises what the work raised."""
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
        """A method of its own, so that no reference to the work remains once it is done."""
        try:
            rest = work()
            self._has_read.set()
            if rest is not None:
                rest()
        except BaseException as error:
            self._error = error
        self._has_read.set()
        self._idle.set()
