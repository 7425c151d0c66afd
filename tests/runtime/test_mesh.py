"""Connections between the ranks of an epoch."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep import mesh as module
from everstep.mesh import Listener, Mesh


def connect(listeners: list[Listener], entries: list[str], seconds: float = 30) -> list[Mesh]:
    with ThreadPoolExecutor(len(listeners)) as threads:
        ranks = range(len(listeners))
        return list(threads.map(lambda r: listeners[r].connect(r, entries, seconds), ranks))


@pytest.fixture
def ranks() -> list[Mesh]:
    listeners = [Listener("127.0.0.1") for _ in range(4)]
    return connect(listeners, [listener.entry for listener in listeners])


def test_each_rank_gets_what_all_others_sent(ranks: list[Mesh]) -> None:
    for step in range(3):
        for rank, one in enumerate(ranks):
            one.send(b"x" * (rank * 1000 + step))
        for rank, one in enumerate(ranks):
            others = {r: b"x" * (r * 1000 + step) for r in range(4) if r != rank}
            assert one.receive() == others


def test_the_largest_messages_are_sent_before_anyone_reads(ranks: list[Mesh]) -> None:
    for one in ranks:
        one.send(b"x" * module.LARGEST)
    assert all(
        len(body) == module.LARGEST for one in ranks for body in (one.receive() or {}).values()
    )


def test_a_message_that_comes_in_parts_keeps_nobody_from_looking(
    ranks: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_MS", 1)
    body = b"x" * 1000
    message = module._LENGTH.pack(len(body)) + body
    parts = [message[:2], message[2:500], message[500:]]
    sender = ranks[1].sockets[0]  # to rank 0
    for one in ranks[2:]:
        one.send(body)

    def look() -> None:
        sender.sendall(parts.pop(0))

    assert ranks[0].receive(look) == dict.fromkeys(range(1, 4), body)
    assert parts == []


@pytest.mark.parametrize("how", ["cut", "closed"])
def test_the_loss_of_one_ends_every_wait(ranks: list[Mesh], how: str) -> None:
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(one.receive) for one in ranks[:3]]
        if how == "cut":
            ranks[3].cut()
        else:
            del ranks[3]
        assert [wait.result(30) for wait in waits] == [None, None, None]
    assert ranks[0].receive() is None


def test_a_rank_that_is_cut_off_waits_no_longer(ranks: list[Mesh]) -> None:
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(ranks[0].receive)
        ranks[0].cut()
        ranks[0].cut()
        assert wait.result(30) is None
    ranks[0].send(b"too late")


def test_a_stranger_is_turned_away() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    entries = [listener.entry for listener in listeners]
    _, port, host = entries[0].split()
    wrong = module._HELLO.pack(bytes(16), 1)
    right_secret = module._HELLO.pack(bytes.fromhex(entries[0].split()[0]), 0)
    strangers = []
    for hello in (wrong, right_secret, b""):
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(hello)
        strangers[-1].shutdown(socket.SHUT_WR)
    first, second = connect(listeners, entries)
    second.send(b"hello")
    assert first.receive() == {1: b"hello"}
    for stranger in strangers:
        stranger.close()


def test_strangers_that_say_nothing_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would cost a second if one were answered after the other, and the limit is a few."""
    monkeypatch.setattr(module, "STRANGERS", 2)
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    entries = [listener.entry for listener in listeners]
    _, port, host = entries[0].split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(12)]
    strangers[0].sendall(b"x")
    first, second = connect(listeners, entries, seconds=8)
    second.send(b"hello")
    assert first.receive() == {1: b"hello"}
    for stranger in strangers:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it had sent was not read
            assert stranger.recv(1) == b""
        stranger.close()


def test_a_rank_that_never_calls_is_an_error_after_the_limit() -> None:
    listener = Listener("127.0.0.1")
    with pytest.raises(OSError, match="timed out"):
        listener.connect(0, [listener.entry, "unused"], 0.05)


def test_a_rank_that_has_to_leave_waits_for_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_MS", 1)

    def look() -> None:
        raise RuntimeError("leave")

    listener = Listener("127.0.0.1")
    with pytest.raises(RuntimeError, match="leave"):
        listener.connect(0, [listener.entry, "unused"], 30, look)
