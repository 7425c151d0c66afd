"""The program of a data worker: a process that fetches micro-batches for one rank, and ends with it.

It is forked from a server that has imported torch, not from the rank: a fork of the rank would copy
locks that other threads hold, and CUDA's state. It imports the training script again, as a module;
`everstep.run` does nothing there.

Each message to the rank is (word, text or None). `BATCH` is followed by a descriptor (`parcel.py`).
"""

import contextlib
import ctypes
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread

import torch

from everstep import parcel
from everstep.fetching import Request, Source

PR_SET_NAME = 15
NAME = b"everstep-data"
"""Name of the process in `ps` and `top`."""
MAIN = "MainProcess"
"""What `multiprocessing` calls a process that it did not start."""
READY, BATCH, FAILED = "ready", "batch", "failed"
UNLOADABLE, UNSENDABLE = "unloadable", "unsendable"
"""The dataset cannot be unpickled here; a batch cannot be sent."""


def is_child() -> bool:
    """Whether `multiprocessing` has started this process, so that it only imports the script.
    Unlike the parent process, the name of the process is known before that import.
    """
    return multiprocessing.current_process().name != MAIN


def serve(connection: Connection) -> None:
    """Serve requests until the rank ends. The first thing that the rank sends is the descriptor
    of a parcel with its `Source`.
    """
    _end_with_rank()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended
        source = _load(connection)
        while source is not None:
            request: Request = connection.recv()
            _answer(connection, source, request)


def _load(connection: Connection) -> Source | None:
    number = parcel.receive(connection)
    try:
        source: Source = parcel.unpack(number, only_reader=False)
    except Exception as error:
        connection.send((UNLOADABLE, f"{type(error).__name__}: {error}"))
        return None
    connection.send((READY, None))
    return source


def _end_with_rank() -> None:
    """End this process when the rank ends. A thread watches for that, so a fetch that takes long or
    never returns does not outlive the rank.
    """
    ctypes.CDLL(None).prctl(PR_SET_NAME, NAME, 0, 0, 0)
    Thread(target=_wait_for_its_end, args=(multiprocessing.parent_process(),), daemon=True).start()


def _wait_for_its_end(rank: BaseProcess) -> None:
    rank.join()
    os._exit(1)


def _answer(connection: Connection, source: Source, request: Request) -> None:
    try:
        batch = source.fetch(request)
    except Exception as error:
        connection.send((FAILED, f"{type(error).__name__}: {error}"))
        return
    try:
        number = parcel.pack(batch)
    except (OSError, MemoryError) as error:
        connection.send((FAILED, f"{type(error).__name__}: {error}"))
        return
    except Exception as error:
        connection.send((UNSENDABLE, f"{type(error).__name__}: {error}"))
        return
    try:
        connection.send((BATCH, None))
        parcel.send(connection, number, os.getppid())
    finally:
        os.close(number)
