"""The data workers of one feed, as their rank sees them.

All of them are forked from one server process of the rank, multiprocessing's own, which has
imported torch once. So an additional data worker, or a replacement, has to import only what the
script imports.

A rank waits for a micro-batch only if a data worker is fetching exactly that one. It fetches any
other itself, such as one that a lost member left, so nothing waits behind a prefetch of later
steps.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

from everstep import data_worker, parcel
from everstep.errors import Misuse
from everstep.fetching import Request, Source

AHEAD = 2
"""Micro-batches for each data worker that are requested and not used yet. So a data worker that has
fetched one continues with the next while the rank computes.
"""
LARGE = 2**14
"""Samples of a micro-batch whose request may not fit into a socket. A data worker that still fetches
another one would read it later, and the rank would wait for that.
"""
_SERVER = multiprocessing.get_context("forkserver")
END_SECONDS = 1.0
"""How long a process may take to end after its connection has ended; then it is killed."""


class DataWorker:
    """One data worker's process, and what it was asked for."""

    def __init__(self, source: int) -> None:
        """`source`: the descriptor of a parcel."""
        self.asked: deque[Request] = deque()
        """Requests without an answer; it is fetching the first one."""
        self.ready, self.useful = False, False
        """It accepts requests; it has fetched something."""
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = _SERVER.Process(target=data_worker.serve, args=(theirs,), daemon=True)
            self._process.start()
        self.pid = self._process.pid or 0
        parcel.send(self.connection, source, self.pid)

    def is_free(self, request: Request) -> bool:
        """Whether it takes the request at once."""
        return self.ready and len(self.asked) < (AHEAD if len(request.ids) <= LARGE else 1)

    def ask(self, request: Request) -> None:
        """Raises OSError if the process has ended."""
        self.asked.append(request)
        self.connection.send(request)

    def receive(self) -> tuple[str, Any]:
        """Receive a word and what belongs to it. Raises EOFError or OSError if the process has ended."""
        word, content = self.connection.recv()
        if word == data_worker.BATCH:
            content = parcel.unpack(parcel.receive(self.connection))
        return word, content

    def end(self, *, at_once: bool = False) -> int:
        """End the process. Return its exit status; below 0: the signal that ended it."""
        self.connection.close()
        if not at_once:
            self._process.join(END_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return self._process.exitcode or 0


class DataWorkers:
    """Keeps `count` processes busy with what the rank will ask for.

    Args:
        feed: its name, for messages.
        note: adds a sentence to the job's status.
    """

    def __init__(
        self, source: Source, count: int, *, feed: str, note: Callable[[str], None]
    ) -> None:
        """Raises `Misuse` if the dataset or `collate` cannot be sent to another process."""
        self._source, self._room, self._feed, self._note = source, AHEAD * count, feed, note
        self._coming: Iterator[Request] = iter(())
        self._window: deque[Request] = deque()
        """What the rank will ask for next; nothing else is requested or kept."""
        self._fetched: dict[Request, Any] = {}
        self._own: dict[Request, str] = {}
        """What no data worker could fetch, and why; the rank has to fetch it."""
        self._loads = False
        """A data worker has loaded the dataset, so the script is right. If a later one cannot start (its script was
        edited, there is no memory), the others go on.
        """
        self._rank = os.getpid()
        self._parcel = _pack(source, count)
        _SERVER.set_forkserver_preload([data_worker.__name__])
        self._workers = [DataWorker(self._parcel) for _ in range(count)]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def expect(self, coming: Iterable[Request]) -> None:
        """Announce what the rank will ask for next, in this order. What has been fetched of it is
        kept; other batches are dropped.
        """
        self._coming = iter(coming)
        self._window.clear()
        self._look_ahead()
        self._fetched = {r: batch for r, batch in self._fetched.items() if r in self._window}
        self._own = {r: why for r, why in self._own.items() if r in self._window}
        self._receive(0)
        self._ask()

    def has(self, request: Request) -> bool:
        """Whether a data worker has fetched this one, or fetches it now."""
        self._receive(0)
        return request in self._fetched or self._is_fetched_now(request)

    def take(self, request: Request) -> Any:
        """Return the batch. Raises what the dataset raises, and `Misuse` if the data
        workers cannot serve the feed.
        """
        self._receive(0)
        while request not in self._fetched and self._is_fetched_now(request):
            self._receive(None)
            self._ask()
        if request in self._window:
            self._window.remove(request)
        self._look_ahead()
        self._ask()
        if request in self._fetched:
            return self._fetched.pop(request)
        return self._fetch(request)

    def close(self) -> None:
        """End them, unless this is a process that the script has forked: they are its parent's."""
        if os.getpid() != self._rank:
            return
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end(at_once=True)
        if self._parcel >= 0:
            os.close(self._parcel)
            self._parcel = -1

    def _fetch(self, request: Request) -> Any:
        """Fetch in this process, so that an exception of the dataset is raised in the script."""
        why = self._own.pop(request, "")
        batch = self._source.fetch(request)
        if why:
            self._note(f"feed {self._feed}: {why}; the rank then fetched it itself")
        return batch

    def _look_ahead(self) -> None:
        self._window.extend(islice(self._coming, self._room - len(self._window)))

    def _is_fetched_now(self, request: Request) -> bool:
        return any(worker.asked and worker.asked[0] == request for worker in self._workers)

    def _ask(self) -> None:
        """Give the rest of the window to the data workers that have the least to do."""
        known = {r for worker in self._workers for r in worker.asked} | {*self._fetched, *self._own}
        for request in [r for r in self._window if r not in known]:
            free = [w for w in self._workers if w.is_free(request)]
            if not free:
                return
            worker = min(free, key=lambda w: len(w.asked))
            try:
                worker.ask(request)
            except OSError:
                self._bury(worker)

    def _receive(self, limit: float | None) -> None:
        """Receive what the data workers have sent, within `limit` seconds. None:
        wait until something arrives.
        """
        connections = {worker.connection: worker for worker in self._workers}
        while found := wait(list(connections), limit):
            for connection in found:
                worker = connections[connection]  # type: ignore[index]
                try:
                    self._note_message(worker, *worker.receive())
                except (EOFError, OSError):
                    self._bury(worker)
            connections, limit = {w.connection: w for w in self._workers}, 0

    def _note_message(self, worker: DataWorker, word: str, content: Any) -> None:
        if word == data_worker.READY:
            worker.ready = self._loads = True
            return
        if word == data_worker.UNLOADABLE and self._loads:
            self._note(
                f"feed {self._feed}: data worker {worker.pid} cannot load the dataset, as others could: {content}. "
                "Was the script edited?"
            )
            return  # it ends by itself
        if word in _REFUSALS:
            raise Misuse(_REFUSALS[word].format(feed=self._feed, problem=content))
        request = worker.asked.popleft()
        worker.useful = True
        if request not in self._window:
            return
        if word == data_worker.BATCH:
            self._fetched[request] = content
        else:
            self._own[request] = (
                f"data worker {worker.pid} could not fetch a micro-batch: {content}"
            )

    def _bury(self, worker: DataWorker) -> None:
        """Remove a data worker that has ended. What it was fetching may be the cause, so no
        other data worker gets that.
        """
        self._workers.remove(worker)
        status = worker.end()
        if not worker.ready and status > 0 and not self._loads:
            raise Misuse(_NO_START.format(feed=self._feed, pid=worker.pid, status=status))
        if worker.asked:
            self._own[worker.asked[0]] = f"data worker {worker.pid} ended while it fetched this"
        then = self._replace(worker)
        self._note(
            f"feed {self._feed}: data worker {worker.pid} {describe_exit(status)}; {then}, and what it had "
            "not fetched is fetched again"
        )

    def _replace(self, worker: DataWorker) -> str:
        """Start a replacement, if this data worker had fetched anything. Return in words what was done."""
        if not worker.useful:
            why = "it had fetched nothing, so it is not replaced"
            return f"{why}: {len(self._workers)} are left"
        try:
            self._workers.append(DataWorker(self._parcel))
        except (OSError, EOFError) as error:  # EOFError: the fork server could not fork
            return f"another cannot be started ({error}): {len(self._workers)} are left"
        return "another takes its place"


def describe_exit(status: int) -> str:
    """Describe the exit status of a process; below 0: the signal that ended it."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = ", out of memory?" if name == "SIGKILL" else ""
    return f"was killed by signal {-status} ({name}{hint})"


def _pack(source: Source, count: int) -> int:
    try:
        return parcel.pack(source)
    except Exception as error:
        raise Misuse(
            f"job.batches: workers={count} sends the dataset and collate to other processes, and they "
            f"cannot be pickled: {type(error).__name__}: {error}. Define their classes and functions at "
            "the top level of a module, and open files, connections and locks in __getitem__, at "
            "its first call. Or set workers=0"
        ) from None


_REFUSALS = {
    data_worker.UNLOADABLE: (
        "job.batches, feed {feed}: a data worker cannot load the dataset: {problem}. It imports the "
        "script as a module, so what the dataset needs has to be defined at its top level, outside of "
        'main and of `if __name__ == "__main__"`. Or set workers=0'
    ),
    data_worker.UNSENDABLE: (
        "job.batches, feed {feed}: a data worker cannot send a batch, which cannot be pickled: "
        "{problem}. Let the dataset and collate return tensors, arrays, numbers, text, and lists, "
        "tuples and dicts of them. Or set workers=0"
    ),
}
_NO_START = (
    "job.batches, feed {feed}: data worker {pid} ended with exit status {status} before it was ready; "
    "its traceback is above. It imports the script as a module: what must not run there belongs into "
    "main. Or set workers=0"
)
