"""Exporters over real HTTP: good pages, every way to fail, and which pods are exporters at all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep_operator.health.outcomes import FailureKind, ScrapeFailure, Target
from everstep_operator.health.parse import Page
from everstep_operator.health.scrape import Scraper
from everstep_operator.health.targets import choose_targets
from fake_exporter import FakeExporter, running_exporter

PAGE = (Path(__file__).parent / "pages" / "healthy.txt").read_text()


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    scraper = Scraper(timeout=2.0, clock=lambda: 100.0, body_limit=100_000)
    yield scraper
    await scraper.close()


@pytest.fixture
async def exporter() -> AsyncIterator[FakeExporter]:
    async with running_exporter(PAGE) as exporter:
        yield exporter


async def test_a_good_page_comes_back_as_a_value(scraper: Scraper, exporter: FakeExporter) -> None:
    scrape = await scraper.scrape(Target(node="node-1", url=exporter.url))
    assert isinstance(scrape.outcome, Page)
    assert (len(scrape.outcome.gpus), scrape.node, scrape.started) == (2, "node-1", 100.0)


async def test_a_page_that_repeats_is_parsed_once(scraper: Scraper, exporter: FakeExporter) -> None:
    target = Target(node="node-1", url=exporter.url)
    first, second = await scraper.scrape(target), await scraper.scrape(target)
    assert first.outcome is second.outcome
    assert exporter.asked == 2


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("hang", FailureKind.TIMEOUT, "did not answer within 2 s"),
        ("http500", FailureKind.HTTP_STATUS, "answered HTTP 500"),
        ("empty", FailureKind.EMPTY, "empty page"),
        ("garbage", FailureKind.UNPARSABLE, "not a page of a dcgm-exporter"),
        ("huge", FailureKind.TOO_LARGE, "larger than"),
        ("redirect", FailureKind.HTTP_STATUS, "answered HTTP 302"),
        ("broken", FailureKind.BROKEN, "metrics"),
    ],
)
async def test_a_failure_is_a_value_that_names_the_exporter(
    scraper: Scraper, exporter: FakeExporter, mode: str, kind: FailureKind, words: str
) -> None:
    exporter.mode = mode
    outcome = (await scraper.scrape(Target(node="node-1", url=exporter.url))).outcome
    assert isinstance(outcome, ScrapeFailure)
    assert outcome.kind is kind
    assert words in outcome.message
    assert exporter.url in outcome.message


async def test_a_closed_port_is_refused(scraper: Scraper) -> None:
    outcome = (
        await scraper.scrape(Target(node="node-1", url="http://127.0.0.1:1/metrics"))
    ).outcome
    assert isinstance(outcome, ScrapeFailure)
    assert outcome.kind is FailureKind.REFUSED


async def test_one_exporter_that_hangs_does_not_hold_up_the_others(scraper: Scraper) -> None:
    async with running_exporter(PAGE) as slow, running_exporter(PAGE) as quick:
        slow.mode = "hang"
        targets = [Target(node="slow", url=slow.url), Target(node="quick", url=quick.url)]
        async with asyncio.timeout(30):
            scrapes = await scraper.scrape_all(targets)
    assert isinstance(scrapes[0].outcome, ScrapeFailure)
    assert isinstance(scrapes[1].outcome, Page)


def a_pod(node: str = "node-1", address: str = "10.0.0.7", **changes: object) -> dict[str, object]:
    ports = changes.get("ports", [{"name": "metrics", "containerPort": 9400}])
    ready = "True" if changes.get("ready", True) else "False"
    return {
        "metadata": {"creationTimestamp": changes.get("created", "2026-11-21T10:00:00Z")},
        "spec": {"nodeName": node, "containers": [{"ports": ports}]},
        "status": {
            "phase": changes.get("phase", "Running"),
            "podIP": address,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def url_of(*pods: dict[str, object]) -> str:
    (target,) = choose_targets(pods, port=9400).values()
    return target.url


def test_the_port_is_the_one_called_metrics_or_the_only_one_or_the_default() -> None:
    other = [{"name": "x", "containerPort": 1}, {"name": "metrics", "containerPort": 9401}]
    assert url_of(a_pod()) == "http://10.0.0.7:9400/metrics"
    assert url_of(a_pod(ports=other)) == "http://10.0.0.7:9401/metrics"
    assert url_of(a_pod(ports=[{"containerPort": 9410}])) == "http://10.0.0.7:9410/metrics"
    assert url_of(a_pod(ports=[])) == "http://10.0.0.7:9400/metrics"
    assert url_of(a_pod(ports=None)) == "http://10.0.0.7:9400/metrics"
    assert url_of(a_pod(address="fd00::7")) == "http://[fd00::7]:9400/metrics"


def test_of_two_exporters_on_a_node_the_ready_younger_one_is_asked() -> None:
    old = a_pod(address="10.0.0.1")
    new = a_pod(address="10.0.0.2", created="2026-11-21T11:00:00Z")
    starting = a_pod(address="10.0.0.3", created="2026-11-21T12:00:00Z", ready=False)
    assert "10.0.0.2" in url_of(old, new, starting)


def test_pods_without_node_or_address_and_finished_ones_are_no_targets() -> None:
    pods = [a_pod(node=""), a_pod(address=""), a_pod(phase="Failed")]
    assert choose_targets(pods, port=9400) == {}
