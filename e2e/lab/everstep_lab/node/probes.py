"""Startup, readiness and liveness probes of one run of a container: httpGet and tcpSocket."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Callbacks for the results of the probes."""

    started: Callable[[], None]
    ready: Callable[[bool], None]
    unhealthy: Callable[[str], None]
    """Called when the liveness or startup probe has failed; the text names the probe."""


async def probe_container(container: Object, host: str, effects: Effects) -> None:
    """Probe the container. The caller cancels the task when the container ends."""
    startup = container.get("startupProbe")
    if startup and not await _until(startup, container, host, good=True):
        effects.unhealthy("startup probe failed")
        return
    effects.started()
    async with asyncio.TaskGroup() as group:
        if container.get("readinessProbe"):
            group.create_task(_readiness(container, host, effects))
        else:
            effects.ready(True)
        if container.get("livenessProbe"):
            group.create_task(_liveness(container, host, effects))


async def _readiness(container: Object, host: str, effects: Effects) -> None:
    probe = container["readinessProbe"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        await _until(probe, container, host, good=True, forever=True)
        effects.ready(True)
        await _until(probe, container, host, good=False, forever=True)
        effects.ready(False)


async def _liveness(container: Object, host: str, effects: Effects) -> None:
    probe = container["livenessProbe"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    await _until(probe, container, host, good=False, forever=True)
    effects.unhealthy("liveness probe failed")


async def _until(
    probe: Object, container: Object, host: str, *, good: bool, forever: bool = False
) -> bool:
    """Probe until the probe's threshold of successes in a row (without `good`: failures) is met.

    Returns False if `failureThreshold` opposite results in a row come first and `forever` is not
    set.
    """
    wanted = probe.get("successThreshold", 1) if good else probe.get("failureThreshold", 3)
    limit = probe.get("failureThreshold", 3)
    row = opposite = 0
    while True:
        if await _once(probe, container, host) == good:
            row, opposite = row + 1, 0
        else:
            row, opposite = 0, opposite + 1
        if row >= wanted:
            return True
        if opposite >= limit and not forever:
            return False
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def _once(probe: Object, container: Object, host: str) -> bool:
    limit = probe.get("timeoutSeconds", 1)
    with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(limit):
            if "tcpSocket" in probe:
                port = find_port(container, probe["tcpSocket"]["port"])
                _, writer = await asyncio.open_connection(
                    probe["tcpSocket"].get("host", host), port
                )
                writer.close()
                return True
            return await _http(probe["httpGet"], container, host)
    return False


async def _http(target: Object, container: Object, host: str) -> bool:
    scheme = target.get("scheme", "HTTP").lower()
    port = find_port(container, target["port"])
    url = f"{scheme}://{target.get('host', host)}:{port}{target.get('path', '/')}"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as answer:
        return 200 <= answer.status < 400


def find_port(container: Object, port: int | str) -> int:
    """The number of a probe's port, given as a number or as the name of a container port."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    named = {entry.get("name"): entry["containerPort"] for entry in container.get("ports") or []}
    return int(named[port]) if port in named else 0
