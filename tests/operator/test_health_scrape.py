"""Exporters over real HTTP: good pages, every way to fail, and which pods are exporters."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep_operator.health import parse
from everstep_operator.health.outcomes import FailureKind, ScrapeFailure, Target
from everstep_operator.health.parse import Page
from everstep_operator.health.rules.registry import load_rules
from everstep_operator.health.scrape import Scraper
from fake_exporter import FakeExporter, running_exporter

PAGE = (Path(__file__).parent / "pages" / "healthy.txt").read_text()


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    scraper = Scraper(
        timeout=2.0, clock=lambda: 100.0, metrics=load_rules().metrics, body_limit=100_000
    )
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


async def test_a_page_that_cannot_be_parsed_at_all_costs_the_others_nothing(
    scraper: Scraper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse_page(body: bytes, metrics: parse.Metrics) -> Page:
        if b"odd" in body:
            raise RuntimeError("a defect in the parser")
        return genuine(body, metrics)

    genuine = parse.parse_page
    monkeypatch.setattr(parse, "parse_page", parse_page)
    async with running_exporter(PAGE + "# odd\n") as odd, running_exporter(PAGE) as good:
        targets = [Target(node="odd", url=odd.url), Target(node="good", url=good.url)]
        first, second = (scrape.outcome for scrape in await scraper.scrape_all(targets))
    assert isinstance(first, ScrapeFailure)
    assert first.kind is FailureKind.UNPARSABLE
    assert isinstance(second, Page)


async def test_one_exporter_that_hangs_does_not_hold_up_the_others(scraper: Scraper) -> None:
    async with running_exporter(PAGE) as slow, running_exporter(PAGE) as quick:
        slow.mode = "hang"
        targets = [Target(node="slow", url=slow.url), Target(node="quick", url=quick.url)]
        async with asyncio.timeout(30):
            scrapes = await scraper.scrape_all(targets)
    assert isinstance(scrapes[0].outcome, ScrapeFailure)
    assert isinstance(scrapes[1].outcome, Page)
