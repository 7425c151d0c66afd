"""Probes and metrics, also while the operator has no file descriptor left."""

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from everstep_contract.http import accepting
from everstep_operator import server
from everstep_operator.settings import load_settings
from everstep_operator.world import World

SCRIPT = Path(__file__).parent / "out_of_descriptors.py"


async def test_health_readiness_and_metrics_are_served() -> None:
    app = server.build_app(World(), lambda: "", lambda: b"everstep 1\n")
    serving = await server.start_server(app, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{serving.address[1]}"
    async with aiohttp.ClientSession() as session:
        for path, status in (("/healthz", 200), ("/readyz", 503), ("/metrics", 200)):
            async with session.get(url + path) as response:
                assert response.status == status
    await serving.close()


async def test_by_default_probes_of_ipv4_and_of_ipv6_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pods of a cluster have addresses of one family, and its kubelets ask there."""
    key = {"EVERSTEP_OPERATOR_KEY": "k" * 16}
    _, settings = load_settings([], key)
    app = server.build_app(World(), lambda: "", lambda: b"")
    families = {"127.0.0.1": True, "[::1]": socket.has_dualstack_ipv6()}
    serving = await server.start_server(app, settings.http_host, 0)
    for host in (host for host, there in families.items() if there):
        url = f"http://{host}:{serving.address[1]}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
    await serving.close()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)  # a node without IPv6
    serving = await server.start_server(app, settings.http_host, 0)
    url = f"http://127.0.0.1:{serving.address[1]}/healthz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
    await serving.close()


def test_requests_for_metrics_take_a_tenth_of_the_time() -> None:
    now, written = 0.0, 0

    def render() -> bytes:
        nonlocal now, written
        now, written = now + 0.7, written + 1
        return f"page {written}".encode()

    page = server.Page(render, lambda: now)
    assert [page.read() for _ in range(50)] == [b"page 1"] * 50
    now += server.PAGE_REST * 0.7 - 0.1
    assert page.read() == b"page 1"
    now += 0.2
    assert page.read() == b"page 2"


async def test_clients_that_only_connect_keep_no_probe_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    app = server.build_app(World(), lambda: "", lambda: b"")
    serving = await server.start_server(app, "127.0.0.1", 0)
    idle = [await asyncio.open_connection(*serving.address) for _ in range(5)]
    url = f"http://127.0.0.1:{serving.address[1]}/healthz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
    for reader, _ in idle[:3]:
        assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not any(reader.at_eof() for reader, _ in idle[3:])
    for _, writer in idle:
        writer.close()
    await serving.close()


async def test_out_of_descriptors_a_probe_waits_and_is_answered_and_it_is_said_once() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            port = int(await process.stdout.readline())
            asking = asyncio.create_task(session.get(f"http://127.0.0.1:{port}/healthz"))
            assert b"ulimit -n" in await process.stdout.readline()
            await asyncio.sleep(3 * accepting.PAUSE_SECONDS)  # the server retries meanwhile
            process.stdin.write(b"\n")
            async with await asking as response:
                assert response.status == 200
            again = (await process.stdout.readline()).decode().strip()
            assert again == "accepting connections again"
    finally:
        process.kill()
        _, errors = await process.communicate()
    assert errors == b""
