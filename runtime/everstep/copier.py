"""Work beside the next step: the copy for a save, until the step changes what is copied."""

import threading
from collections.abc import Callable


class Copier:
    """One thread, one piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin once the last piece has ended. Raises what that one has raised."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="everstep-copy", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Raises what the work has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
