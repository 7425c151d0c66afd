"""The sockets of this rank's groups. gloo gives none out, so those that appear while a group is formed
are duplicated, unless other code opened them: to cut the group, to count its bytes, and to close
them in forked children.
"""

import gc
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress

_TCP_INFO = struct.Struct("=120x2Q")
"""The start of `struct tcp_info`, up to the bytes acknowledged and the bytes received (Linux 4.2 or newer)."""
_TIMEVAL_BYTES = struct.calcsize("@2l")


def open_sockets() -> dict[int, str]:
    """List the open sockets: descriptor → the socket's identity, such as `socket:[4711]`."""
    found = {int(name): identify(int(name)) for name in os.listdir("/proc/self/fd")}
    return {number: name for number, name in found.items() if name.startswith("socket:")}


def identify(number: int) -> str:
    """What a descriptor stands for now; empty: it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def list_new(before: Mapping[int, str], after: Mapping[int, str]) -> dict[int, str]:
    """List the sockets that have appeared, by identity. Comparing numbers would not do: gloo closes
    the sockets of the former group meanwhile, and a new socket gets the number of a closed one.
    """
    known = set(before.values())
    return {number: name for number, name in after.items() if name not in known}


def own(found: Mapping[int, str]) -> list[socket.socket]:
    """Duplicate the group's connections. No forked child may keep its sockets open after this process
    dies: the peers would not notice its death.
    """
    duplicates = [d for number, name in found.items() if (d := _take(number, name))]
    close_in_children(duplicates)
    return duplicates


def close_in_children(sockets: Iterable[socket.socket]) -> None:
    """Have forked children close these sockets."""
    copies.update({s.fileno(): identify(s.fileno()) for s in sockets})


def close_new_in_children(before: Mapping[int, str]) -> None:
    """The same for the sockets of a group that is never cut."""
    for number, name in list_new(before, open_sockets()).items():
        if duplicate := _take(number, name):
            duplicate.close()


def _take(number: int, name: str) -> socket.socket | None:
    """Duplicate a connection of the group. None: gloo has closed it because a neighbour is lost, or
    it is no connection, or it is not the group's.
    """
    try:
        inheritable = os.get_inheritable(number)
        copy = os.dup(number)
    except OSError:
        return None
    if identify(copy) != name:
        os.close(copy)
        return None
    # Without NONBLOCK here, a default timeout of the script would make gloo's own socket non-blocking.
    duplicate = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    if not _is_foreign(duplicate, inheritable):
        copies[number] = name
        with suppress(OSError):
            os.set_inheritable(number, False)
        if _is_connection(duplicate):
            return duplicate
    duplicate.close()
    return None


def _is_foreign(one: socket.socket, inheritable: bool) -> bool:
    """Whether the script or a library has opened this socket meanwhile. gloo's and NCCL's sockets are
    inheritable. Python's are not, nor are those of most libraries. If gloo changes that, there is
    still its time limit for sending, which Python never gives to the kernel.
    """
    limit = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL_BYTES)
    return not inheritable and not any(limit)


def _is_connection(one: socket.socket) -> bool:
    # The script may have opened others meanwhile: to a data worker (unix), for metrics (UDP).
    kind = one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    if one.family == socket.AF_UNIX or kind != socket.SOCK_STREAM:
        return False
    # If gloo's listener were shut down, its accept would fail, and gloo would call std::terminate.
    return not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


copies: dict[int, str] = {}
"""The sockets of the groups and of the unit, which no forked child may keep: descriptor → identity.
After a loss gloo closes its own sockets, and something else may then have the number.
"""


def forget_closed() -> None:
    """Forget the sockets of groups that are gone."""
    for number, name in list(copies.items()):
        if identify(number) != name:
            copies.pop(number, None)


def _close_copies() -> None:
    for number, name in copies.items():
        if identify(number) == name:
            os.close(number)


def _let_go() -> None:
    """Leave the groups to this process's parent: close their sockets, and never collect a group.
    gloo's destructor waits for threads that only the parent has, so a collection would hang.
    """
    gc.freeze()
    _close_copies()


# Python cannot undo this, so it is done once, at import. Without a group there is nothing to let go.
os.register_at_fork(after_in_child=_let_go)


def count_bytes(one: socket.socket) -> int | None:
    """Count the bytes that the kernel has received and those that the other side has acknowledged.
    A retransmission does not count. None: it is no TCP connection, or the kernel does not report
    them.
    """
    try:
        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    return sum(_TCP_INFO.unpack(told)) if len(told) == _TCP_INFO.size else None


def shut_down(duplicate: socket.socket) -> None:
    try:
        duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
