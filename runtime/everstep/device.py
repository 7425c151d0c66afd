"""The device on which this process computes, the same for its whole life, and work beside the script's on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
PIECE_BYTES = 2**25
_PORTABLE = 1
"""`cudaHostRegisterPortable`."""
_own = torch.device("cpu")
_side: torch.cuda.Stream | None = None


def claim(local_rank: int) -> torch.device:
    """Choose this process's device by its rank in the pod, for the calling thread and those that `enter`."""
    global _own
    if torch.cuda.is_available():
        _own = torch.device("cuda", local_rank % torch.cuda.device_count())
    enter()
    return _own


def enter() -> None:
    """In a new thread: CUDA's current device belongs to a thread, and each begins with the first one. What a thread
    does on another rank's device takes some hundred megabytes there.
    """
    if _own.type == "cuda":
        torch.cuda.set_device(_own)


def own() -> torch.device:
    return _own


def mark() -> torch.cuda.Event | None:
    """In the script's thread: all that its stream has been given so far. None: the device is the CPU."""
    return torch.cuda.current_stream().record_event() if _own.type == "cuda" else None


@contextmanager
def beside(marked: torch.cuda.Event | None) -> Iterator[None]:
    """In another thread: what it does on the device follows `marked` only, so it runs beside all that the script's
    stream is given later. It is over at the end.
    """
    if marked is None:
        yield
        return
    global _side
    enter()
    if _side is None:
        _side = torch.cuda.Stream(_own)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(_side):
        _side.wait_event(marked)
        try:
            yield
        finally:
            _side.synchronize()


def synchronize() -> None:
    """Until the device has done all that any stream of this process was given before."""
    if _own.type == "cuda":
        torch.cuda.synchronize(_own)


def fetch(tensor: torch.Tensor, room: Bytes) -> None:
    """Copy from the device to memory that is not pinned; over on return.

    By way of a pinned buffer: straight to the memory of a file that CUDA had refused to pin, a copy left zeros,
    without an error (H100, CUDA 13.0, driver 580, Linux 6.18).
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    buffer = torch.empty(min(raw.numel(), PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
    filled = buffer.numpy()
    for at in range(0, raw.numel(), PIECE_BYTES):
        piece = raw[at : at + PIECE_BYTES]
        buffer[: piece.numel()].copy_(piece, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        np.copyto(room[at : at + piece.numel()], filled[: piece.numel()])


def pin(room: Bytes) -> bool:
    """Let the device copy to this memory by itself, four times as fast. False: it cannot (of a file on a disk)."""
    if _own.type != "cuda":
        return False
    enter()
    if int(_runtime().cudaHostRegister(room.ctypes.data, room.nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # torch would take this for an error of the thread's next kernel
        torch.arange(1, device=_own)
    return False


def unpin(room: Bytes) -> None:
    _runtime().cudaHostUnregister(room.ctypes.data)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def read_numbers(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Of tensors with one element: one transfer, for which the script's stream is waited for."""
    if all(number.device.type == "cpu" for number in numbers):
        return [float(number) for number in numbers]
    found: list[float] = torch.stack([n.detach().double().reshape(()) for n in numbers]).tolist()
    return found
