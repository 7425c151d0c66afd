"""Reading an exporter over HTTP. A failure is a value like any other: silence is a signal of its own."""

import asyncio
import enum
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp

from everstep_operator.health import parse

BODY_LIMIT = 8 * 1024 * 1024
CONCURRENT = 64


class FailureKind(enum.Enum):
    REFUSED = "refused"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http-status"
    EMPTY = "empty"
    UNPARSABLE = "unparsable"
    TOO_LARGE = "too-large"
    BROKEN = "broken"
    """The connection ended in the middle."""
    ABSENT = "absent"
    """There is no exporter pod on the node any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFailure:
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An exporter. The node comes from the pod, not from what the page says of itself."""

    node: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    node: str
    started: float
    """Seconds since the Unix epoch, before the request was sent."""
    seconds: float
    outcome: parse.Page | ScrapeFailure


class Scraper:
    """Keeps one connection per exporter; close it at the end."""

    def __init__(self, *, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._clock = clock
        self._gate = asyncio.Semaphore(CONCURRENT)
        self._session: aiohttp.ClientSession | None = None
        self._pages: dict[str, tuple[bytes, parse.Page]] = {}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape_all(self, targets: Iterable[Target]) -> list[Scrape]:
        """All at once, at most `CONCURRENT` on their way."""
        targets = tuple(targets)
        self._forget_others(targets)
        return list(await asyncio.gather(*(self.scrape(target) for target in targets)))

    async def scrape(self, target: Target) -> Scrape:
        async with self._gate:
            started, begun = self._clock(), time.monotonic()
            outcome = await self._outcome(target)
            seconds = time.monotonic() - begun
        return Scrape(node=target.node, started=started, seconds=seconds, outcome=outcome)

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
                if len(body) > BODY_LIMIT:
                    said = f"{url}: the page is larger than {BODY_LIMIT} bytes"
                    return ScrapeFailure(kind=FailureKind.TOO_LARGE, message=said)
            return bytes(body)

    def _parsed(self, url: str, body: bytes) -> parse.Page | ScrapeFailure:
        """A page that repeats itself (the exporter samples less often than we ask) is parsed once."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        held = self._pages.get(url)
        if held is not None and held[0] == digest:
            return held[1]
        try:
            page = parse.parse_page(body)
        except parse.PageError as error:
            kind = FailureKind.EMPTY if error.empty else FailureKind.UNPARSABLE
            return ScrapeFailure(kind=kind, message=f"{url}: {error}")
        self._pages[url] = (digest, page)
        return page

    def _forget_others(self, targets: tuple[Target, ...]) -> None:
        urls = {target.url for target in targets}
        self._pages = {url: held for url, held in self._pages.items() if url in urls}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # raise_for_status and cookies stay off: an exporter is not trusted with anything.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=2),
            )
        return self._session


def choose_targets(pods: Iterable[Mapping[str, object]], *, port: int) -> dict[str, Target]:
    """One exporter per node from a list of Pod objects; of two (an update rolls on) the ready, younger one."""
    best: dict[str, tuple[tuple[bool, str], Target]] = {}
    for pod in pods:
        found = _target(pod, port)
        if found is None:
            continue
        rank = (_is_ready(pod), str(_part(pod, "metadata").get("creationTimestamp", "")))
        if found.node not in best or rank > best[found.node][0]:
            best[found.node] = (rank, found)
    return {node: target for node, (_, target) in sorted(best.items())}


def _target(pod: Mapping[str, object], port: int) -> Target | None:
    spec, status = _part(pod, "spec"), _part(pod, "status")
    node, address = spec.get("nodeName"), status.get("podIP")
    if not node or not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    host = f"[{address}]" if ":" in str(address) else address
    return Target(node=str(node), url=f"http://{host}:{_port_of(spec, port)}/metrics")


def _port_of(spec: Mapping[str, object], default: int) -> int:
    """The container port called "metrics", else the default if the pod names it, else its only one."""
    containers = spec.get("containers")
    ports = [
        port
        for container in (containers if isinstance(containers, list) else [])
        for port in container.get("ports") or ()
    ]
    named = [p["containerPort"] for p in ports if p.get("name") == "metrics"]
    numbers = [p["containerPort"] for p in ports]
    if named:
        return int(named[0])
    return int(numbers[0]) if len(numbers) == 1 and default not in numbers else default


def _is_ready(pod: Mapping[str, object]) -> bool:
    conditions = _part(pod, "status").get("conditions")
    return any(
        c.get("type") == "Ready" and c.get("status") == "True"
        for c in (conditions if isinstance(conditions, list) else [])
    )


def _part(pod: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = pod.get(name)
    return part if isinstance(part, Mapping) else {}
