"""The device on which this process computes, the same for its whole life; and work on it
in parallel with the script's.
"""

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
    """Choose this process's device by its rank in the pod, for the calling thread and those that call `enter`."""
    global _own
    if torch.cuda.is_available():
        _own = torch.device("cuda", local_rank % torch.cuda.device_count())
    enter()
    return _own


def enter() -> None:
    """Select the device in a new thread: CUDA's current device is set per thread, and each thread
    begins with the first device. A thread that uses another rank's device takes some hundred
    megabytes there.
    """
    if _own.type == "cuda":
        torch.cuda.set_device(_own)


def own() -> torch.device:
    return _own


def mark() -> torch.cuda.Event | None:
    """Mark all work that the script's stream was given so far; called in the script's thread.
    None: the device is the CPU.
    """
    return torch.cuda.current_stream().record_event() if _own.type == "cuda" else None


@contextmanager
def beside(marked: torch.cuda.Event | None) -> Iterator[None]:
    """A context for work on the device in another thread. This work waits only for `marked`, so it
    runs in parallel with what the script's stream is given later. It is complete when the context
    ends.
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
    """Wait until the device has done all that any stream of this process was given before."""
    if _own.type == "cuda":
        torch.cuda.synchronize(_own)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, uint8 [bytes], on its device; a view if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # it may have any stride, and torch views no bytes of such a one
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def read(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The tensor's bytes, in pieces of uint8 on the CPU. A piece of a tensor on the device is valid
    until the next piece is asked for: all go through one pinned buffer, which is forty times as
    fast as `tensor.cpu()`.
    """
    raw = bytes_of(tensor)
    if raw.device.type == "cpu":
        yield from torch.split(raw, piece_bytes)
        return
    buffer = torch.empty(
        min(raw.numel(), piece_bytes), dtype=torch.uint8, device="cpu", pin_memory=True
    )
    for piece in torch.split(raw, piece_bytes):
        held = buffer[: piece.numel()]
        held.copy_(piece, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        yield held


@contextmanager
def writing(room: torch.Tensor) -> Iterator[torch.Tensor]:
    """A context with memory on the CPU. What is in it at the end of the context is in `room`, which
    may be on the device.
    """
    if room.device.type == "cpu":
        yield room
        return
    buffer = torch.empty(room.shape, dtype=room.dtype, device="cpu", pin_memory=True)
    yield buffer
    room.copy_(buffer)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a plain tensor on the CPU, in memory that is not pinned: torch keeps pinned memory
    for good, and up to twice the size.
    """
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fetch(tensor, held.reshape(-1).view(torch.uint8).numpy())
    return held


def fetch(tensor: torch.Tensor, room: Bytes) -> None:
    """Copy from the device to memory that is not pinned; complete on return.

    The copy goes through a pinned buffer: a direct copy to the memory of a file that CUDA had
    refused to pin left zeros, without an error (H100, CUDA 13.0, driver 580, Linux 6.18).
    """
    at = 0
    for piece in read(tensor):
        np.copyto(room[at : at + len(piece)], piece.numpy())
        at += len(piece)


def pin(room: Bytes) -> bool:
    """Pin this memory, so that the device copies to it directly, four times as fast. False: it
    cannot be pinned (a file on a disk).
    """
    if _own.type != "cuda":
        return False
    enter()
    if int(_runtime().cudaHostRegister(room.ctypes.data, room.nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # else torch reports this as an error of the thread's next kernel
        torch.arange(1, device=_own)
    return False


def unpin(room: Bytes) -> None:
    _runtime().cudaHostUnregister(room.ctypes.data)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def read_numbers(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Read tensors with one element each, in one transfer that waits for the script's stream."""
    if all(number.device.type == "cpu" for number in numbers):
        return [float(number) for number in numbers]
    found: list[float] = torch.stack([n.detach().double().reshape(()) for n in numbers]).tolist()
    return found
