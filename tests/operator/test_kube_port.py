"""The port to the API server, against a real HTTP server that answers like an API server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from everstep_operator import answers, kube
from everstep_operator.kube import Kube
from everstep_operator.pacing import Bucket, Lane
from everstep_operator.tokens import AccountTokens

Answer = Callable[[web.Request], Any]


class Server:
    """Answers each request with the next (status, body) of `answers`, and records the request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, Any]] = []
        self.answers: list[tuple[int, Any]] = []
        self.bearers: list[str] = []
        self.held: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        content = request.headers.get("Content-Type", "")
        self.asked.append(
            (request.method, request.path_qs, content, json.loads(raw) if raw else None)
        )
        self.bearers.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.held is not None:
            await self.held.wait()
        status, body = self.answers.pop(0) if self.answers else (200, {})
        return web.json_response(body, status=status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield found
    await runner.cleanup()


@pytest.fixture
async def port(server: Server, tmp_path: Path) -> AsyncIterator[Kube]:
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": server.url}}],  # type: ignore[attr-defined]
        "users": [{"name": "x", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    found = await Kube.connect(kubeconfig=str(path))
    yield found
    await found.close()


def refusal(status: int, reason: str, message: str = "no") -> tuple[int, Any]:
    return status, {"kind": "Status", "reason": reason, "message": message}


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (404, "NotFound", kube.Gone), (410, "Expired", kube.Gone), (409, "Conflict", kube.Conflict),
        (409, "AlreadyExists", kube.AlreadyExists), (403, "Forbidden", kube.Denied),
        (401, "Unauthorized", kube.Denied), (422, "Invalid", kube.Invalid), (400, "BadRequest", kube.Invalid),
        (429, "TooManyRequests", kube.Transient), (500, "InternalError", kube.Transient),
        (503, "", kube.Transient),
    ],
)  # fmt: skip
async def test_errors_are_sorted_by_what_can_be_done(
    server: Server, port: Kube, status: int, reason: str, error: type[kube.KubeError]
) -> None:
    server.answers = [refusal(status, reason, "the server's words")]
    with pytest.raises(error) as caught:
        await port.get(kube.PODS, "p", "ns")
    assert type(caught.value) is error
    assert caught.value.message == "the server's words"


def test_an_answer_that_is_no_status_is_still_an_error() -> None:
    found = answers.classify_error(502, b"<html>bad gateway</html>")
    assert isinstance(found, kube.Transient)
    assert "bad gateway" in found.message


async def test_a_server_that_is_not_there_is_transient(port: Kube, server: Server) -> None:
    lost = Kube(port._client, Bucket(10, 10))
    port._client.configuration.host = "http://127.0.0.1:9"
    with pytest.raises(kube.Transient):
        await lost.get(kube.NODES, "n")


async def test_a_delete_names_the_very_object(server: Server, port: Kube) -> None:
    await port.delete(kube.PODS, "p", "ns", uid="u1", grace_seconds=0)
    method, path, _, body = server.asked[0]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/ns/pods/p")
    assert (body["preconditions"], body["gracePeriodSeconds"]) == ({"uid": "u1"}, 0)


async def test_patches_say_what_they_are(server: Server, port: Kube) -> None:
    await port.patch(kube.JOBS, "j", {"status": {}}, "ns", sub="status")
    await port.patch(kube.NODES, "n", [{"op": "test"}])
    assert [(p, c) for _, p, c, _ in server.asked] == [
        ("/apis/everstep.dev/v1alpha1/namespaces/ns/resilienttrainingjobs/j/status", "application/merge-patch+json"),
        ("/api/v1/nodes/n", "application/json-patch+json"),
    ]  # fmt: skip


async def test_a_dry_run_is_one(server: Server, port: Kube) -> None:
    await port.create(kube.PODS, {"metadata": {"name": "p"}}, "ns", dry_run=True)
    assert server.asked[0][1] == "/api/v1/namespaces/ns/pods?dryRun=All"


async def test_long_lists_come_in_pages(server: Server, port: Kube) -> None:
    server.answers = [
        (200, {"items": [{"n": 1}], "metadata": {"continue": "c", "resourceVersion": "9"}}),
        (200, {"items": [{"n": 2}], "metadata": {"resourceVersion": "9"}}),
    ]
    assert await port.list(kube.PODS, labels="a=b") == ([{"n": 1}, {"n": 2}], "9")
    assert "continue=c" in server.asked[1][1]


async def test_names_never_become_path_segments(server: Server, port: Kube) -> None:
    await port.get(kube.PODS, "../../secrets/x", "ns")
    assert server.asked[0][1].endswith("/pods/..%2F..%2Fsecrets%2Fx")


async def test_a_bucket_of_one_token_lets_status_writes_through() -> None:
    bucket = Bucket(qps=1000.0, burst=1)
    async with asyncio.timeout(0.2):
        for lane in (Lane.STATUS, Lane.RECOVERY, Lane.STATUS):
            await bucket.take(lane)


async def test_half_of_the_bucket_is_kept_for_recoveries() -> None:
    bucket = Bucket(qps=1000.0, burst=4)
    for _ in range(2):
        await bucket.take(Lane.STATUS)
    assert bucket.waited_seconds == 0
    for _ in range(2):
        await bucket.take(Lane.RECOVERY)
    before = bucket.waited_seconds
    await bucket.take(Lane.STATUS)
    assert bucket.waited_seconds > before


async def test_a_recovery_does_not_queue_behind_status_writes() -> None:
    bucket = Bucket(qps=0.001, burst=4)
    await bucket.take(Lane.STATUS)
    await bucket.take(Lane.STATUS)
    waiting = asyncio.create_task(bucket.take(Lane.STATUS))
    await asyncio.sleep(0)
    began = time.monotonic()
    await bucket.take(Lane.RECOVERY)
    assert time.monotonic() - began < 60, "a queue would take 1,000 s"
    waiting.cancel()


async def test_without_a_cluster_it_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(kube.NoCluster, match="set KUBECONFIG"):
        await Kube.connect(kubeconfig=str(tmp_path / "absent"))


@pytest.mark.parametrize("written", ["{", "text", "[]", "{clusters: 3, current-context: x}"])
async def test_a_kubeconfig_that_cannot_be_read_is_told_without_a_traceback(
    tmp_path: Path, written: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(written)
    with pytest.raises(kube.NoCluster, match="set KUBECONFIG"):
        await Kube.connect(kubeconfig=str(path))


async def test_whoever_lost_the_lease_writes_nothing_and_may_still_read(
    server: Server, port: Kube
) -> None:
    port.seconds_left = lambda: 0.0
    with pytest.raises(kube.Standby):
        await port.patch(kube.PODS, "x", {}, "default")
    with pytest.raises(kube.Standby):
        await port.create(kube.PODS, {}, "default", dry_run=True)
    assert server.asked == []
    await port.get(kube.PODS, "x", "default")


async def test_no_write_outlives_the_deadline_of_the_lease(server: Server, port: Kube) -> None:
    server.held = asyncio.Event()
    port.seconds_left = lambda: 0.1
    with pytest.raises(kube.Transient, match=r"no answer within the 0.1 s .* held the lease"):
        await port.delete(kube.PODS, "x", "default", uid="u")
    server.held.set()


def a_token(value: str, seconds: int = 3600) -> tuple[int, Any]:
    return 201, {"status": {"token": value}, "spec": {"expirationSeconds": seconds}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def nodes(port: Kube) -> AsyncIterator[tuple[Kube, Clock]]:
    """A port under another identity, and the clock that determines the age of its tokens."""
    clock = Clock()
    found = port.build_other("nodes", AccountTokens(port, ("ns", "everstep-nodes"), clock))
    yield found, clock
    await found.close()


async def test_another_identity_writes_with_a_token_of_its_own(
    server: Server, nodes: tuple[Kube, Clock]
) -> None:
    server.answers = [a_token("first"), (200, {}), (200, {})]
    await nodes[0].patch(kube.NODES, "n", {})
    await nodes[0].patch(kube.NODES, "n", {})
    paths = [(method, path) for method, path, _, _ in server.asked]
    assert paths == [
        ("POST", "/api/v1/namespaces/ns/serviceaccounts/everstep-nodes/token"),
        ("PATCH", "/api/v1/nodes/n"),
        ("PATCH", "/api/v1/nodes/n"),
    ]
    assert server.bearers == ["t", "first", "first"]


async def test_a_token_is_renewed_at_four_fifths_of_the_life_that_was_granted(
    server: Server, nodes: tuple[Kube, Clock]
) -> None:
    port, clock = nodes
    server.answers = [a_token("first", 600), (200, {}), (200, {}), a_token("second"), (200, {})]
    await port.patch(kube.NODES, "n", {})
    clock.now = 479
    await port.patch(kube.NODES, "n", {})
    clock.now = 480
    await port.patch(kube.NODES, "n", {})
    assert server.bearers == ["t", "first", "first", "t", "second"]


async def test_a_token_that_is_refused_is_renewed_once(
    server: Server, nodes: tuple[Kube, Clock]
) -> None:
    server.answers = [a_token("old"), refusal(401, "Unauthorized"), a_token("new"), (200, {})]
    await nodes[0].patch(kube.NODES, "n", {})
    assert server.bearers == ["t", "old", "t", "new"]
    server.answers = [refusal(401, "Unauthorized"), a_token("newer"), refusal(401, "Unauthorized")]
    with pytest.raises(kube.Denied):
        await nodes[0].patch(kube.NODES, "n", {})


async def test_an_old_token_serves_on_while_no_new_one_is_to_be_had(
    server: Server, nodes: tuple[Kube, Clock]
) -> None:
    port, clock = nodes
    server.answers = [a_token("first"), (200, {}), refusal(503, ""), (200, {}), refusal(503, "")]
    await port.patch(kube.NODES, "n", {})
    clock.now = 3000
    await port.patch(kube.NODES, "n", {})
    clock.now = 3600
    with pytest.raises(kube.Transient, match="no token of ServiceAccount ns/everstep-nodes"):
        await port.patch(kube.NODES, "n", {})
