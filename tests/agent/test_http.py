import aiohttp
import pytest

from everstep_agent import http
from everstep_agent.messages import After, Who
from everstep_agent.peers import PeerClient, PeerError, Pool
from everstep_contract import auth, codec

TOKEN = "secret"


@pytest.fixture
async def address():
    async def who(body: bytes) -> bytes:
        after = codec.loads(After, body)
        return codec.dumps(Who(slot=after.version, attempt=0))

    server = http.Server(TOKEN, {"/v1/who": who})
    await server.open("127.0.0.1", 0)
    yield f"127.0.0.1:{server.port}"
    await server.close()


async def ask(client: PeerClient, version: int = 1) -> Who:
    return await client.call("/v1/who", After(version=version), Who, timeout=5.0)


async def test_a_client_with_the_token_is_answered_again_and_again(address: str):
    async with PeerClient(address, TOKEN) as client:
        assert [(await ask(client, n)).slot for n in (1, 2, 3)] == [1, 2, 3]


async def test_a_wrong_token_is_refused(address: str):
    async with PeerClient(address, "guess") as client:
        with pytest.raises(PeerError) as caught:
            await ask(client)
        assert caught.value.refused


async def test_health_and_nonce_need_no_token_and_everything_else_does(address: str):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/healthz") as response:
            assert response.status == 200
        async with session.get(f"http://{address}/v1/nonce") as response:
            assert len((await response.json())["nonce"]) >= 32
        async with session.post(f"http://{address}/v1/who", data=b"{}") as response:
            assert response.status == 401
            assert response.headers[auth.HEADER_NONCE]


async def test_a_request_that_was_heard_before_is_refused(address: str):
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"http://{address}/v1/nonce") as response:
            signer = auth.Signer(TOKEN)
            signer.renew((await response.json())["nonce"])
        body = codec.dumps(After(version=1))
        headers = signer.headers("POST", "/v1/who", body)
        for expected in (200, 401):
            async with session.post(
                f"http://{address}/v1/who", data=body, headers=headers
            ) as response:
                assert response.status == expected
                await response.read()


async def test_a_body_that_does_not_decode_is_refused_by_the_name_of_its_field(address: str):
    async with PeerClient(address, TOKEN) as client:
        with pytest.raises(PeerError, match="version"):
            await client.call("/v1/who", {"version": "x"}, Who, timeout=5.0)


async def test_nobody_there_is_told_from_a_refusal():
    async with PeerClient("127.0.0.1:9", TOKEN) as client:
        with pytest.raises(PeerError) as caught:
            await ask(client)
        assert not caught.value.refused


async def test_a_pool_keeps_its_connections_for_the_next_call(address: str):
    pool = Pool(TOKEN)
    for n in (1, 2):
        found = await pool.call(address, "/v1/who", After(version=n), Who, timeout=5.0)
        assert found.slot == n
    await pool.close()
