"""Answers of a failing API server, as they arrive over HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from everstep_lab import kubeconfig
from everstep_operator import kube
from everstep_operator.kube import Kube
from everstep_operator.scheduler import Scheduler


@pytest.fixture
async def answers() -> AsyncIterator[list[web.Response]]:
    """The server's next answers, to any request. The first has the server's URL in its header `url`."""
    said: list[web.Response] = []

    async def handle(request: web.Request) -> web.Response:
        return said.pop(0)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    said.append(web.Response(headers={"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}))
    yield said
    await runner.cleanup()


@pytest.fixture
async def port(answers: list[web.Response], tmp_path: Path) -> AsyncIterator[Kube]:
    url = answers.pop(0).headers["url"]
    config = tmp_path / "kubeconfig"
    kubeconfig.write_private(config, kubeconfig.build(url, b"", "t", "x"))
    found = await Kube.connect(kubeconfig=str(config))
    yield found
    await found.close()


QUOTA = "forbidden: exceeded quota: small, requested: count/secrets=1, used: 5, limited: 5"
NO_RIGHT = 'forbidden: User "everstep-operator" cannot create resource "pods" in API group "" in the namespace "team"'


@pytest.mark.parametrize(
    ("kind", "text", "counted"),
    [
        (kube.PODS, QUOTA, "PodRefused"),
        (kube.SECRETS, QUOTA, "PodRefused"),
        (kube.EVENTS, QUOTA, "Denied"),
        (kube.PODS, NO_RIGHT, "Denied"),
        (kube.SECRETS, NO_RIGHT, "Denied"),
    ],
)
async def test_only_what_a_users_quota_refuses_does_not_count_as_a_right_that_is_missing(
    answers: list[web.Response], port: Kube, kind: kube.Kind, text: str, counted: str
) -> None:
    told = {"kind": "Status", "reason": "Forbidden", "message": text}
    answers.append(web.json_response(told, status=403))
    with pytest.raises(kube.Denied):
        await port.create(kind, {"metadata": {"name": "x"}}, "team")
    assert port.calls == {("POST", counted): 1}


@pytest.mark.parametrize("text", ['{"items": [{"metadata": {"na', "<html>502</html>", ""])
async def test_an_answer_that_is_cut_or_no_json_is_transient_and_shown(
    answers: list[web.Response], port: Kube, text: str
) -> None:
    answers.append(web.Response(text=text))
    with pytest.raises(kube.Transient, match="is not JSON, or is incomplete") as caught:
        await port.list(kube.PODS)
    assert text[:20] in caught.value.message


@pytest.mark.parametrize(
    ("given", "heard"), [("7", 7.0), ("86400", 60.0), ("", 0.0), ("soon", 0.0)]
)
async def test_how_long_the_server_asks_us_to_wait_is_heard(
    answers: list[web.Response], port: Kube, given: str, heard: float
) -> None:
    answers.append(web.Response(status=429, text="{}", headers={"Retry-After": given}))
    with pytest.raises(kube.Transient) as caught:
        await port.get(kube.PODS, "p", "ns")
    assert caught.value.retry_after == heard


def listed(version: int, more: str = "") -> web.Response:
    metadata = {"resourceVersion": str(version), "continue": more}
    return web.json_response({"items": [], "metadata": metadata})


async def test_a_list_older_than_one_read_before_means_that_etcd_was_restored(
    answers: list[web.Response], port: Kube
) -> None:
    answers += [listed(10, "more"), listed(10), listed(10), listed(7), listed(9)]
    await port.list(kube.PODS)
    await port.list(kube.PODS)
    await port.list(kube.NODES)
    assert not port.went_back.is_set(), (
        "pages of one list, an equal version, and another kind are no reason"
    )
    await port.list(kube.PODS)
    assert port.went_back.is_set()


async def test_a_pass_that_was_told_to_wait_is_tried_no_sooner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def run_pass(key: tuple[str, str]) -> None:
        error = kube.Transient(429, "TooManyRequests", "slow down")
        error.retry_after = 25.0
        raise error

    found = Scheduler(run_pass, on_pass=lambda outcome, seconds: ended.set())
    task = asyncio.create_task(found.run())
    with caplog.at_level(logging.ERROR):
        found.wake(("ns", "a"))
        async with asyncio.timeout(10):
            await ended.wait()
    assert "again in 25 s" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
