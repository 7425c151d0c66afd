"""Passes an object between two processes as one file in memory that both map, so tensors and arrays
are copied once and need no room in /dev/shm.

The file holds the bytes of every tensor and array, then a pickle that refers to them, then an index
of where each of these is. Only parent and child exchange such files.
"""

import io
import os
import pickle
import struct
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO

import torch

_END = struct.Struct("=2q")
"""Where the index is: the last bytes of the file."""
_ALIGNED = 64
COPIED_BYTES = 2**16
"""Smaller tensors and arrays are copied, so that a script which keeps the labels of a batch does not keep
the memory of its inputs.
"""
Span = tuple[int, int]


def pack(thing: Any) -> int:
    """Write `thing` to a new file, and return its descriptor. What pickle raises is passed on."""
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(thing)
    number = os.memfd_create("everstep-parcel")
    try:
        with open(number, "wb", closefd=False) as file:
            spans = [_append(file, buffer.raw()) for buffer in buffers]
            index = pickle.dumps((_append(file, text.getbuffer()), spans))
            file.write(_END.pack(*_append(file, index)))
    except BaseException:
        os.close(number)
        raise
    return number


def unpack(number: int, *, only_reader: bool = True) -> Any:
    """Return what the file holds, and close `number`. Tensors and arrays may be written to. Large ones
    are views of the file, whose memory is freed with the last of them.

    Args:
        only_reader: False: other processes read the file, too, so a page that this process writes
            to becomes its own copy.
    """
    try:
        room = _map(number, shared=only_reader)
    finally:
        os.close(number)
    view = room.numpy().data
    at, length = _END.unpack(view[-_END.size :])
    (start, size), spans = pickle.loads(view[at : at + length])
    buffers = [_take(room[a : a + n]) for a, n in spans]
    return pickle.loads(view[start : start + size], buffers=buffers)


def send(connection: Connection, number: int, process: int) -> None:
    """Send a file's descriptor to the process at the other end."""
    send_handle(connection, number, process)
    _block_again(connection)


def receive(connection: Connection) -> int:
    """Receive a file's descriptor."""
    number = recv_handle(connection)
    _block_again(connection)
    return number


def _block_again(connection: Connection) -> None:
    """For a descriptor, multiprocessing takes the connection for a socket. If the script has set a default timeout
    (`socket.setdefaulttimeout`), the connection blocks no longer, and its next `recv` would fail.
    """
    os.set_blocking(connection.fileno(), True)


def _map(number: int, *, shared: bool) -> torch.Tensor:
    """The bytes of the file. Unlike `mmap.mmap`, this mapping keeps no descriptor."""
    size = os.fstat(number).st_size
    path = f"/proc/self/fd/{number}"
    return torch.from_file(path, shared=shared, size=size, dtype=torch.uint8, device="cpu")


def _take(part: torch.Tensor) -> memoryview:
    return (part if len(part) >= COPIED_BYTES else part.clone()).numpy().data


def _append(file: BinaryIO, content: memoryview | bytes) -> Span:
    file.write(bytes(-file.tell() % _ALIGNED))
    place = file.tell()
    file.write(content)
    return place, len(content)


class _Pickler(pickle.Pickler):
    """Hands over plain tensors on the CPU as buffers outside of the pickle; numpy does
    so for its arrays by itself.
    """

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        place = (pickle.PickleBuffer(_bytes_of(thing)), thing.dtype, thing.shape, thing.stride())
        return _rebuild, place


def _is_plain(tensor: torch.Tensor) -> bool:
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not special
    )


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The part of the storage that the tensor spans, with its gaps, so that
    its strides stay as they are.
    """
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = (sum((count - 1) * stride for count, stride in steps) + 1) * size
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return whole[start : start + length].numpy()


def _rebuild(
    content: Any, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)
