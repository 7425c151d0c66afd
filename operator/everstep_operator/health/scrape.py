"""Reads exporters over HTTP. Silence is a signal, so a failure is returned as a value."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable

import aiohttp

from everstep_operator.health import parse
from everstep_operator.health.outcomes import FailureKind, Scrape, ScrapeFailure, Target

log = logging.getLogger(__name__)

BODY_LIMIT = 8 * 1024 * 1024
CONCURRENT = 64


class Scraper:
    """Keeps one connection per exporter; close it at the end."""

    def __init__(
        self,
        *,
        timeout: float,
        clock: Callable[[], float],
        metrics: parse.Metrics,
        body_limit: int = BODY_LIMIT,
    ) -> None:
        self._metrics = metrics
        self._timeout = timeout
        self._clock = clock
        self._body_limit = body_limit
        self._gate = asyncio.Semaphore(CONCURRENT)
        self._session: aiohttp.ClientSession | None = None
        self._pages: dict[str, tuple[bytes, parse.Page]] = {}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape_all(self, targets: Iterable[Target]) -> list[Scrape]:
        """Scrape all targets concurrently, at most `CONCURRENT` at a time."""
        targets = tuple(targets)
        self._forget_others(targets)
        return list(await asyncio.gather(*(self.scrape(target) for target in targets)))

    async def scrape(self, target: Target) -> Scrape:
        async with self._gate:
            started, begun = self._clock(), time.monotonic()
            outcome = await self._outcome(target)
            seconds = time.monotonic() - begun
        return Scrape(
            node=target.node, started=started, steady=begun, seconds=seconds, outcome=outcome
        )

    async def _outcome(self, target: Target) -> parse.Page | ScrapeFailure:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._fetch(target.url)
        except TimeoutError:
            said = f"{target.url} did not answer within {self._timeout:g} s"
            return ScrapeFailure(kind=FailureKind.TIMEOUT, message=said)
        except aiohttp.ClientConnectorError as error:
            said = f"{target.url}: {error.strerror or error}"
            return ScrapeFailure(kind=FailureKind.REFUSED, message=said)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said = f"{target.url}: {error or type(error).__name__}"
            return ScrapeFailure(kind=FailureKind.BROKEN, message=said)
        return answer if isinstance(answer, ScrapeFailure) else self._parsed(target.url, answer)

    async def _fetch(self, url: str) -> bytes | ScrapeFailure:
        async with self._open().get(url, allow_redirects=False) as response:
            if response.status != 200:
                said = f"{url} answered HTTP {response.status}"
                return ScrapeFailure(kind=FailureKind.HTTP_STATUS, message=said)
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._body_limit:
                    said = f"{url}: the page is larger than {self._body_limit} bytes"
                    return ScrapeFailure(kind=FailureKind.TOO_LARGE, message=said)
            return bytes(body)

    def _parsed(self, url: str, body: bytes) -> parse.Page | ScrapeFailure:
        """An unchanged page (the exporter samples less often than it is asked) is parsed once."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        held = self._pages.get(url)
        if held is not None and held[0] == digest:
            return held[1]
        try:
            page = parse.parse_page(body, self._metrics)
        except parse.PageError as error:
            kind = FailureKind.EMPTY if error.empty else FailureKind.UNPARSABLE
            return ScrapeFailure(kind=kind, message=f"{url}: {error}")
        except Exception as error:  # one odd page must not end the round for all others
            log.exception("the page of %s", url)
            return ScrapeFailure(kind=FailureKind.UNPARSABLE, message=f"{url}: {error!r}")
        self._pages[url] = (digest, page)
        return page

    def _forget_others(self, targets: tuple[Target, ...]) -> None:
        urls = {target.url for target in targets}
        self._pages = {url: held for url, held in self._pages.items() if url in urls}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # raise_for_status and cookies stay off: an exporter is not trusted.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=2),
            )
        return self._session
