"""The agent's socket: its path, and that closing it leaves nothing behind."""

import asyncio
import io
import os
from pathlib import Path

from everstep_agent import logline
from everstep_agent.pod import worker_socket
from everstep_contract import wire


class Peer:
    pid = os.getpid()
    writer: asyncio.StreamWriter | None = None


def test_a_short_folder_holds_the_socket_by_its_name() -> None:
    path = worker_socket.choose_socket_path("/everstep/memory", pid=1, descriptor=9)
    assert path == "/everstep/memory/agent.sock"


def test_a_path_too_long_for_a_socket_leads_through_a_descriptor() -> None:
    path = worker_socket.choose_socket_path("/x" * 60, pid=17, descriptor=9)
    assert path == "/proc/17/fd/9/agent.sock"


async def test_the_end_of_a_worker_is_told_after_its_last_frame(tmp_path: Path) -> None:
    peer, told, over = Peer(), list[str](), asyncio.Event()

    def on_end(_: Peer) -> None:
        told.append("end")
        over.set()

    server: worker_socket.Link[Peer] = worker_socket.Link(
        str(tmp_path),
        find={peer.pid: peer}.get,
        on_frame=lambda _, envelope: told.append(type(envelope.frame).__name__),
        on_end=on_end,
        log=logline.Log(io.StringIO()),
    )
    await server.open()
    _, writer = await asyncio.open_unix_connection(server.path)
    writer.write(wire.encode(wire.Hello(pid=peer.pid, protocol=1)))
    last = wire.encode(wire.Finished(epoch=1, step=3))
    writer.write(last + last[:-1])
    writer.close()
    await asyncio.wait_for(over.wait(), 5)
    assert told == ["Hello", "Finished", "end"]
    await server.close()


async def test_a_worker_is_heard_in_a_deep_folder_and_the_end_leaves_it_empty(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("deep" * 20) / ("deeper" * 10)
    deep.mkdir(parents=True)
    heard: asyncio.Queue[wire.Envelope] = asyncio.Queue()
    peer = Peer()
    server: worker_socket.Link[Peer] = worker_socket.Link(
        str(deep),
        find={peer.pid: peer}.get,
        on_frame=lambda _, envelope: heard.put_nowait(envelope),
        log=logline.Log(io.StringIO()),
    )
    await server.open()
    assert [entry.name for entry in deep.iterdir()] == ["agent.sock"]
    _, writer = await asyncio.open_unix_connection(server.path)
    writer.write(wire.encode(wire.Hello(pid=peer.pid, protocol=1)))
    envelope = await asyncio.wait_for(heard.get(), 5)
    assert envelope.frame == wire.Hello(pid=peer.pid, protocol=1)
    writer.close()
    await server.close()
    assert list(deep.iterdir()) == []
