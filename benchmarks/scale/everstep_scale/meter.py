"""The operator's resource use: its own counters, /proc, and resource versions in the API server."""

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep_contract import names
from everstep_lab.api import Api

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_CALLS = re.compile(
    r'^everstep_operator_api_calls_total\{identity="(\w+)",outcome="(\w+)",verb="(\w+)"\} (\S+)$',
    re.MULTILINE,
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counted since the process started."""

    calls: Mapping[str, int] = field(default_factory=dict)
    """Calls by verb, successful or not."""
    troubled: Mapping[str, int] = field(default_factory=dict)
    """Unsuccessful calls, by outcome."""
    cpu_seconds: float = 0.0
    resident_bytes: int = 0

    @property
    def writes(self) -> int:
        return sum(count for verb, count in self.calls.items() if verb in WRITES)

    def since(self, other: "Usage") -> "Usage":
        return Usage(
            calls=_difference(self.calls, other.calls),
            troubled=_difference(self.troubled, other.troubled),
            cpu_seconds=self.cpu_seconds - other.cpu_seconds,
            resident_bytes=self.resident_bytes,
        )


def _difference(new: Mapping[str, int], old: Mapping[str, int]) -> dict[str, int]:
    return {k: n - old.get(k, 0) for k, n in new.items() if n != old.get(k, 0)}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def read_usage(pid: int, page: str) -> Usage:
    """Read the operator's usage so far. `page` is its /metrics page."""
    calls, troubled = parse_calls(page)
    return Usage(
        calls=calls,
        troubled=troubled,
        cpu_seconds=_cpu_seconds(pid),
        resident_bytes=_resident_bytes(pid),
    )


def parse_calls(page: str) -> tuple[dict[str, int], dict[str, int]]:
    calls: Counter[str] = Counter()
    troubled: Counter[str] = Counter()
    for _, outcome, verb, count in _CALLS.findall(page):
        calls[verb] += round(float(count))
        if outcome != "Done":
            troubled[outcome] += round(float(count))
    return dict(calls), dict(troubled)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident_bytes(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


async def list_versions(api: Api) -> dict[str, str]:
    """Resource versions of all objects that the operator writes; if two lists are equal, nothing was written."""
    group = f"/apis/{names.GROUP}/{names.VERSION}"
    ours = (f"{group}/{names.PLURAL}", f"{group}/{names.QUARANTINE_PLURAL}")
    found = {}
    for path in (*ours, "/api/v1/events", "/api/v1/secrets"):
        for item in await api.list(path):
            found[item["metadata"]["uid"]] = item["metadata"]["resourceVersion"]
    return found


async def count_states(api: Api) -> Counter[str]:
    return Counter((job.get("status") or {}).get("state", "New") for job in await list_jobs(api))


async def list_steps(api: Api) -> dict[str, int]:
    """Job → the step in its status."""
    return {
        job["metadata"]["name"]: (job.get("status") or {}).get("step", 0)
        for job in await list_jobs(api)
    }


async def list_jobs(api: Api) -> list[dict[str, Any]]:
    return await api.list(f"/apis/{names.GROUP}/{names.VERSION}/{names.PLURAL}")
