"""Frames to the agent keep their order, and those of short steps are sent together."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import agent_socket
from everstep.agent_socket import AgentSocket
from everstep.errors import StateError
from everstep_contract import wire


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentSocket, socket.socket]]:
    """The worker's socket, and the agent's end of it."""
    monkeypatch.setattr(agent_socket, "SOON_SECONDS", 3600.0)
    left = threading.Event()
    monkeypatch.setattr(AgentSocket, "leave", lambda self, status: left.set())
    worker, agent = socket.socketpair()
    agent.settimeout(10)
    ours = AgentSocket(worker, lambda frame: None)
    ours._sent_soon_at = -7200.0
    with agent:
        yield ours, agent
    assert left.wait(10)  # the reader has ended


def applied(step: int) -> wire.Applied:
    return wire.Applied(epoch=1, step=step, loss=0.5, grad_norm=None)


def read(agent: socket.socket) -> object:
    (length,) = wire.LENGTH.unpack(agent.recv(wire.LENGTH.size, socket.MSG_WAITALL))
    return wire.decode(agent.recv(length, socket.MSG_WAITALL)).frame


def is_silent(agent: socket.socket) -> bool:
    agent.setblocking(False)
    try:
        return not agent.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        agent.settimeout(10)


def test_the_first_is_sent_at_once_and_more_wait(ends: tuple[AgentSocket, socket.socket]) -> None:
    ours, agent = ends
    ours.send_soon(applied(1))
    assert read(agent) == applied(1)
    ours.send_soon(applied(2))
    assert is_silent(agent)


def test_what_waits_is_sent_before_the_next_frame(
    ends: tuple[AgentSocket, socket.socket],
) -> None:
    ours, agent = ends
    for step in range(1, 4):
        ours.send_soon(applied(step))
    ours.send(wire.Finished(epoch=1, step=3))
    expected = [applied(1), applied(2), applied(3), wire.Finished(epoch=1, step=3)]
    assert [read(agent) for _ in expected] == expected
    assert is_silent(agent)


def test_what_waits_is_sent_once_its_time_has_passed(
    ends: tuple[AgentSocket, socket.socket],
) -> None:
    ours, agent = ends
    for step in (1, 2):
        ours.send_soon(applied(step))
    ours._sent_soon_at -= 3600.0
    ours.send_soon(applied(3))
    assert [read(agent) for _ in range(3)] == [applied(1), applied(2), applied(3)]


def test_a_frame_that_the_agent_would_refuse_is_not_sent(
    ends: tuple[AgentSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, agent = ends
    monkeypatch.setattr(wire, "LIMIT_BYTES", 2**20)
    with pytest.raises(StateError, match="takes 2 MiB as text, and the limit is 1 MiB: keep long"):
        ours.send(wire.Applied(epoch=1, step=1, loss=0.5, grad_norm=None, notes=("x" * 2**21,)))
    ours.send(applied(2))
    assert read(agent) == applied(2)


def test_a_default_timeout_of_the_script_does_not_end_the_worker_of_a_silent_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = threading.Event()
    monkeypatch.setattr(AgentSocket, "leave", lambda self, status: left.set())
    path = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        socket.setdefaulttimeout(0.01)
        try:
            ours = agent_socket.connect(path, lambda frame: None)
        finally:
            socket.setdefaulttimeout(None)
        assert ours._connection.gettimeout() is None
        listener.accept()[0].close()
    assert left.wait(10)  # the reader has ended
