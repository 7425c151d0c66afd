"""The exporter over HTTP: one page per collect interval, and each way to fail."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from everstep_lab.exporter.gpu import Gpu, build_gpu, with_xid
from everstep_lab.exporter.render import Holder
from everstep_lab.exporter.server import ExporterServer

HOST, PORT = "127.64.250.2", 19400
URL = f"http://{HOST}:{PORT}/metrics"


class Machine:
    """What the server reads: GPUs, the processes that hold them, and a clock that stands still."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = [build_gpu(0, "node-1", 0)]
        self.held: dict[str, Holder] = {}
        self.server = ExporterServer(
            "node-1", gpus=lambda: self.gpus, holders=lambda: self.held, clock=lambda: 5.0
        )


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    machine = Machine()
    # The interval is longer than any test, so each test calls `collect` itself.
    task = asyncio.create_task(machine.server.run(HOST, PORT, interval=3600))
    await machine.server.listening.wait()
    yield machine
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def scrape(timeout: float = 5.0) -> tuple[int, str]:
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit) as session, session.get(URL) as answer:
        return answer.status, await answer.text()


async def test_values_change_only_at_a_collect(machine: Machine) -> None:
    before = await scrape()
    machine.gpus[0] = with_xid(machine.gpus[0], 79, now=5.0)
    assert await scrape() == before
    machine.server.collect()
    assert 'err_code="79"' in (await scrape())[1]


async def test_a_pod_is_named_one_collect_after_it_got_the_device(machine: Machine) -> None:
    machine.held[machine.gpus[0].uuid] = Holder(container="c", namespace="n", pod="job-0-1")
    machine.server.collect()
    assert "job-0-1" not in (await scrape())[1]
    machine.server.collect()
    assert "job-0-1" in (await scrape())[1]


async def test_refused_closes_the_port_and_ok_opens_it_again(machine: Machine) -> None:
    await machine.server.set_mode("refused")
    with pytest.raises(aiohttp.ClientConnectorError):
        await scrape()
    await machine.server.set_mode("ok")
    assert (await scrape())[0] == 200


async def test_http500_has_no_metrics(machine: Machine) -> None:
    await machine.server.set_mode("http500")
    status, text = await scrape()
    assert status == 500
    assert "DCGM_FI" not in text


async def test_empty_is_a_good_answer_with_nothing_in_it(machine: Machine) -> None:
    await machine.server.set_mode("empty")
    assert await scrape() == (200, "")


async def test_hang_lasts_until_the_clients_limit(machine: Machine) -> None:
    await machine.server.set_mode("hang")
    with pytest.raises(TimeoutError):
        await scrape(timeout=0.2)


async def test_frozen_repeats_the_last_page_whatever_happens(machine: Machine) -> None:
    before = await scrape()
    await machine.server.set_mode("frozen")
    machine.gpus[0] = with_xid(machine.gpus[0], 79, now=5.0)
    machine.server.collect()
    assert await scrape() == before
