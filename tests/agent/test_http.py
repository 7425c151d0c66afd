"""The agents' HTTP with real clients and servers: authentication, and how much is read before it."""

import asyncio
import secrets
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from everstep_agent.peers import http
from everstep_agent.peers.client import UNUSED_SECONDS, PeerClient, PeerError, Pool
from everstep_agent.peers.messages import Accepted, After, Who
from everstep_contract import auth, codec, levels
from everstep_contract.http import accepting
from everstep_contract.http.channel import BODY_BYTES, HEAD_BYTES, UNPROVEN_BYTES
from strangers import Stranger, exchange

TOKEN = "secret"
HERE = Path(__file__).parent


class Said(list[str]):
    """The server's log messages."""

    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
async def server(said: Said) -> AsyncIterator[http.Server]:
    async def who(body: bytes) -> bytes:
        after = codec.loads(After, body)
        return codec.dumps(Who(slot=after.version, attempt=0))

    async def fail(body: bytes) -> bytes:
        raise RuntimeError("broken handler")

    async def echo(body: bytes) -> bytes:
        return body

    found = http.Server(
        TOKEN, {"/v1/who": who, "/v1/fail": fail, "/v1/echo": echo, "/v1/wanted": echo}, said
    )
    await found.open("127.0.0.1", 0)
    yield found
    await found.close()


@pytest.fixture
def address(server: http.Server) -> str:
    return server.address


async def ask(client: PeerClient, version: int = 1) -> Who:
    return await client.call("/v1/who", After(version=version), Who, timeout=5.0)


async def test_a_client_with_the_token_is_answered_again_and_again(address: str) -> None:
    async with PeerClient(address, TOKEN) as client:
        assert [(await ask(client, n)).slot for n in (1, 2, 3)] == [1, 2, 3]


async def test_a_wrong_token_is_refused_and_the_agent_says_so_once(
    address: str, said: Said
) -> None:
    for _ in range(3):
        async with PeerClient(address, "guess") as client:
            with pytest.raises(PeerError, match="401") as caught:
                await ask(client)
            assert caught.value.stranger, "it refuses without proof of our token"
    assert len(said) == 1
    assert "without proof of the job's token" in said[0]


async def test_health_and_nonce_need_no_token_and_everything_else_does(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/healthz") as response:
            assert response.status == 200
        async with session.get(f"http://{address}/v1/nonce") as response:
            assert len((await response.json())["nonce"]) >= 32
        async with session.post(f"http://{address}/v1/who", data=b"{}") as response:
            assert response.status == 401
            assert response.headers[auth.NONCE]


async def test_a_question_that_was_heard_before_is_refused(address: str) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"http://{address}/v1/nonce") as response:
            signer = auth.Signer(TOKEN, address)
            signer.begin((await response.json())["nonce"])
        body = codec.dumps(After(version=1))
        question, headers = signer.sign("POST", "/v1/who", body, secrets.token_hex(16))
        for expected in (200, 401):
            async with session.post(
                f"http://{address}/v1/who", data=body, headers=headers
            ) as response:
                assert response.status == expected
                proven = signer.believe(question, response.status, response.headers) is not None
                assert proven == (expected == 200)
                await response.read()


async def test_a_body_that_does_not_decode_is_refused_by_the_name_of_its_field(
    address: str,
) -> None:
    async with PeerClient(address, TOKEN) as client:
        with pytest.raises(PeerError, match="version") as caught:
            await client.call("/v1/who", {"version": "x"}, Who, timeout=5.0)
        assert caught.value.refused


async def test_a_handler_that_fails_costs_its_question_alone(address: str, said: Said) -> None:
    async with PeerClient(address, TOKEN) as client:
        with pytest.raises(PeerError, match="RuntimeError: broken handler"):
            await client.call("/v1/fail", {}, Who, timeout=5.0)
        assert (await ask(client)).slot == 1
    assert "broken handler" in said[0]


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "127.0.0.1:-1", "nowhere", "[::1]:x", ""])
async def test_what_is_no_address_is_nobody(address: str) -> None:
    """Another pod has reported it."""
    async with PeerClient(address, TOKEN) as client:
        with pytest.raises(PeerError) as caught:
            await ask(client)
        assert not caught.value.refused


async def test_nobody_there_is_told_from_a_refusal() -> None:
    async with PeerClient("127.0.0.1:9", TOKEN) as client:
        with pytest.raises(PeerError) as caught:
            await ask(client)
        assert not caught.value.refused
        assert not caught.value.stranger


async def test_a_pool_keeps_its_connections_for_the_next_call(address: str) -> None:
    pool = Pool(TOKEN)
    for n in (1, 2):
        found = await pool.call(address, "/v1/who", After(version=n), Who, timeout=5.0)
        assert found.slot == n
    assert [len(idle) for idle in pool._idle.values()] == [1]
    await pool.close()


async def test_a_pool_closes_the_connections_that_it_no_longer_uses(
    server: http.Server, address: str
) -> None:
    """Such as those to pods that are gone."""
    now = [0.0]
    pool = Pool(TOKEN, clock=lambda: now[0])
    await pool.call(address, "/v1/who", After(version=1), Who, timeout=5.0)
    ((_, unused),) = pool._idle[address]
    now[0] = UNUSED_SECONDS
    with pytest.raises(PeerError):
        await pool.call("127.0.0.1:9", "/v1/who", After(version=1), Who, timeout=5.0)
    assert not unused.is_open
    assert not pool._idle
    await pool.close()


async def test_a_client_whose_connection_was_closed_meanwhile_opens_another(
    server: http.Server,
) -> None:
    async with PeerClient(server.address, TOKEN) as client:
        await ask(client)
        for caller in list(server._callers):
            assert caller.task is not None
            caller.task.cancel()
            await asyncio.wait([caller.task])
        assert (await ask(client, 7)).slot == 7


# --- answers from strangers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "token"),
    [({}, ""), ({auth.DIGEST: "0" * 64, auth.PROOF: "0" * 64}, ""), ({}, "of another job")],
    ids=["unsigned", "forged", "with the token of another job"],
)
async def test_an_answer_that_proves_nothing_is_not_believed(
    headers: dict[str, str], token: str
) -> None:
    async with (
        Stranger(codec.dumps(Accepted(acting=True)), headers, token=token) as stranger,
        PeerClient(stranger.address, TOKEN) as client,
    ):
        with pytest.raises(PeerError, match="is ignored") as caught:
            await client.call("/v1/report", {}, Accepted, timeout=5.0)
    assert caught.value.stranger
    assert not caught.value.refused


async def test_the_answer_of_another_agent_that_a_stranger_passes_on_is_not_believed(
    address: str,
) -> None:
    """The stranger relays request and answer, and presents that agent's nonce as its own."""
    async with Stranger(relay_to=address) as stranger:
        async with PeerClient(stranger.address, TOKEN) as client:
            with pytest.raises(PeerError) as caught:
                await ask(client)
        assert caught.value.stranger
        assert stranger.relayed == ["401"], "the request was for another address"


async def test_an_answer_that_was_recorded_is_not_believed_a_second_time() -> None:
    """The stranger knows a nonce and the agent's answer to the same request with that nonce."""
    signer, server = auth.Signer(TOKEN, "x:1"), auth.Verifier(TOKEN, "x:1", "0f" * 16)
    body = codec.dumps(After())
    signer.begin(server.nonce)
    question, headers = signer.sign("POST", "/v1/who", body, secrets.token_hex(16))
    taken = server.accept("POST", "/v1/who", headers)
    assert taken is not None
    recorded = server.sign(taken[0], 200, b"{}")
    assert signer.believe(question, 200, recorded)
    signer.begin(server.nonce)
    again, _ = signer.sign("POST", "/v1/who", body, secrets.token_hex(16))
    assert (again.nonce, again.counter) == (question.nonce, question.counter)
    assert signer.believe(again, 200, recorded) is None


async def test_of_a_server_that_proved_nothing_a_few_kilobytes_are_read() -> None:
    async with (
        Stranger(b"x" * 40_000_000) as stranger,
        PeerClient(stranger.address, TOKEN) as client,
    ):
        with pytest.raises(PeerError, match="is ignored"):
            await ask(client)
        await asyncio.wait_for(stranger.cut_off.wait(), 10)
        async with (
            Stranger(endless_head=True) as endless,
            PeerClient(endless.address, "t") as other,
        ):
            with pytest.raises(PeerError, match=str(HEAD_BYTES)):
                await ask(other)


async def test_a_proven_answer_of_many_members_is_read_whole(address: str) -> None:
    member = levels.Member(slot=1, attempt=1, incarnation=1, rank=1, life=1)
    many = levels.Seen(members=(member,) * 5000)
    async with PeerClient(address, TOKEN) as client:
        found = await client.call("/v1/echo", many, levels.Seen, timeout=20.0)
    assert found == many


async def test_a_server_that_proves_the_jobs_token_is_believed() -> None:
    """The same stranger with the right token: only the token makes the difference."""
    async with (
        Stranger(codec.dumps(Accepted(acting=True)), token=TOKEN) as peer,
        PeerClient(peer.address, TOKEN) as client,
    ):
        assert (await client.call("/v1/report", {}, Accepted, timeout=5.0)).acting


# --- requests from strangers ----------------------------------------------------------------------


async def test_a_stranger_is_answered_before_its_body_is_read(address: str) -> None:
    """The header announces almost 64 MiB; the server answers without waiting for the body."""
    head = f"POST /v1/part HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY_BYTES - 1}\r\n\r\n"
    async with asyncio.timeout(5):
        answer = await exchange(address, head.encode())
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/who HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/who HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/who HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: 1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\r\n\r\n",
    ],
    ids=["chunked", "negative", "two lengths", "long head", "folded", "tls", "empty"],
)
async def test_what_is_not_our_http_ends_the_connection_and_nothing_else(
    address: str, raw: bytes
) -> None:
    async with asyncio.timeout(5):
        assert await exchange(address, raw) == b""
    async with PeerClient(address, TOKEN) as client:
        assert (await ask(client)).slot == 1


async def test_a_body_other_than_the_one_that_was_signed_is_refused(address: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        async with session.get(f"http://{address}/v1/nonce") as response:
            signer = auth.Signer(TOKEN, address)
            signer.begin((await response.json())["nonce"])
        _, headers = signer.sign("POST", "/v1/echo", b"a", secrets.token_hex(16))
        async with session.post(
            f"http://{address}/v1/echo", data=b"b", headers=headers
        ) as response:
            assert response.status == 401


async def test_an_operator_of_one_minor_version_before_is_understood(address: str) -> None:
    """It sends the older proof, which counts for a small body only, and expects no proof back."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        async with session.get(f"http://{address}/v1/nonce") as response:
            nonce = (await response.json())["nonce"]
        for counter, path, body, status in (
            (1, "/v1/wanted", b"{}", 200),
            (2, "/v1/echo", b"{}", 401),
            (3, "/v1/wanted", b"x" * (UNPROVEN_BYTES + 1), 401),
        ):
            question = auth.Exchange(
                server="", nonce=nonce, counter=counter, challenge="", method="POST", path=path
            )
            headers = {
                "Everstep-Nonce": nonce,
                "Everstep-Counter": str(counter),
                "Everstep-Mac": auth.prove_as_before(TOKEN, question, body),
            }
            async with session.post(
                f"http://{address}{path}", data=body, headers=headers
            ) as response:
                assert response.status == status


async def test_a_connection_that_proves_nothing_is_closed_and_a_proven_one_stays(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PROVE_SECONDS", 0.3)
    async with PeerClient(address, TOKEN) as client:
        await ask(client)
        before = client._connection._channel
        async with asyncio.timeout(10):
            assert await exchange(address, b"POST /v1/who HTTP/1.1\r\nx: ") == b""
        await ask(client)
        assert client._connection._channel is before


async def test_of_too_many_strangers_the_oldest_goes_and_peers_get_through(
    server: http.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "UNPROVEN_CONNECTIONS", 8)
    host, _, port = server.address.rpartition(":")
    lines = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
    async with PeerClient(server.address, TOKEN) as client:
        assert (await ask(client)).slot == 1
    assert len(server._unproven) <= 8
    async with asyncio.timeout(10):
        assert await lines[0][0].read() == b""
    for _, writer in lines:
        writer.close()


def test_strangers_leave_descriptors_for_the_agents_own_work() -> None:
    assert http.choose_unproven_limit(1024) == 256
    assert http.choose_unproven_limit(1 << 20) == http.UNPROVEN_CONNECTIONS
    assert http.choose_unproven_limit(-1) == http.UNPROVEN_CONNECTIONS


async def test_out_of_descriptors_the_server_pauses_says_so_once_and_goes_on() -> None:
    script = str(HERE / "out_of_descriptors.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().strip()
            async with PeerClient(address, "token") as client:
                asking = asyncio.create_task(client.call("/v1/report", {}, Accepted, timeout=30))
                assert b"ulimit -n" in await process.stdout.readline()
                await asyncio.sleep(3 * accepting.PAUSE_SECONDS)  # the server retries meanwhile
                process.stdin.write(b"\n")
                assert (await asking).acting, "a client that waited in the backlog must be answered"
            again = (await process.stdout.readline()).decode().strip()
            assert again == "accepting connections again"
    finally:
        process.kill()
        _, errors = await process.communicate()
    assert errors == b""
