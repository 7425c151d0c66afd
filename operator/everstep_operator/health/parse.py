"""The text of a dcgm-exporter page as values.

Most of a page is not needed, so a byte filter picks the lines of the metrics that the rules
name. Plain lines are read by one regular expression; all others (escapes, unusual spaces,
errors) are left to prometheus_client's parser. (Measured on a page of 480 series, 132 KB: the
parser takes 26 ms for the full page, the filter 0.09 ms; see `benchmarks/exporter_page.py`.)
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
ALWAYS = (ENERGY, TEMPERATURE)
"""Always read: the first dates the page, the second shows GPUs that have no other series."""
Metrics = Mapping[str, str]
"""Metric → the label whose number distinguishes its series; "" for none. `Rules.metrics` lists what
the rules read.
"""

BLANK_INT32 = 0x7FFFFFF0
"""DCGM's numbers for "no value" start here (dcgm_structs.h). dcgm-exporter leaves such series out;
other exporters may not.
"""
BLANK_FLOAT = 2.0**47


_LABEL = r'[a-zA-Z_]\w*="[^"\\\n]*"'
_PLAIN_LINE = re.compile(
    rf"(\w+)(?:\{{({_LABEL}(?:,{_LABEL})*)?\}})? ([0-9.eE+-]+|NaN)(?: [0-9]+)?", re.ASCII
)
_PAIR = re.compile(r'(\w+)="([^"]*)"')
_CODE = re.compile(r"[0-9]{1,9}")
_UUID = re.compile(rb'\b(UUID|uuid)="[^"]')


class PageError(ValueError):
    """The text is not a page of a dcgm-exporter; `empty`: there is no text at all."""

    def __init__(self, message: str, *, empty: bool = False) -> None:
        super().__init__(message)
        self.empty = empty


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One page's values for one GPU; None for a metric that the exporter does not export."""

    uuid: str
    index: str = ""
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Metric → code → value, for the requested metrics; code 0 for those without a label."""
    energy: float | None = None
    """Millijoules since the driver was loaded; it increases even while the GPU is idle."""
    pods: frozenset[str] = frozenset()
    """"namespace/name"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    gpus: Mapping[str, GpuSample]
    """By UUID."""
    hostname: str = ""
    bad_lines: int = 0


def parse_page(body: bytes, metrics: Metrics) -> Page:
    """Parse a page. Unreadable lines are tolerated, as long as others can be read.

    Raises:
        PageError: empty, or not a page of a dcgm-exporter.
    """
    if not body.strip():
        raise PageError("the exporter answered with an empty page", empty=True)
    of_rules = filter_lines(body, metrics)
    samples, bad = _samples(of_rules + filter_lines(body, ALWAYS))
    if not samples and (bad or b"DCGM_" not in body):
        shown = body[:60].decode(errors="replace").strip()
        raise PageError(f"not a page of a dcgm-exporter: it begins with {shown!r}")
    gpus: dict[str, GpuSample] = {}
    hostname = ""
    for sample in samples:
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid") or ""
        if uuid:
            hostname = hostname or _hostname(sample)
            gpus[uuid] = _add(gpus.get(uuid) or GpuSample(uuid=uuid), sample, metrics)
    if not of_rules and _UUID.search(body):
        raise PageError(
            "it shows GPUs, but none of the metrics that Everstep reads, so no fault would be found: add them "
            f"({', '.join(metrics)}) to the exporter's list of metrics. dcgm-exporter 4.8.2 leaves some out although "
            "they are listed: use another version"
        )
    return Page(gpus=gpus, hostname=hostname, bad_lines=bad)


def filter_lines(body: bytes, names: Iterable[str]) -> bytes:
    """The sample lines of these metrics, in the order of `names`."""
    text = b"\n" + body + b"\n"
    kept: list[bytes] = []
    for name in names:
        start = b"\n" + name.encode()
        at = text.find(start)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            if text[at + len(start) : at + len(start) + 1] in (b"{", b" "):
                kept.append(text[at + 1 : end])
            at = text.find(start, end)
    return b"\n".join(kept) + b"\n" if kept else b""


def _samples(lines: bytes) -> tuple[list[Sample], int]:
    samples: list[Sample] = []
    bad = 0
    for line in filter(None, lines.decode(errors="replace").split("\n")):
        try:
            samples += _parse_line(line)
        except (ValueError, IndexError, OverflowError):  # IndexError: an empty label name
            bad += 1
    return samples, bad


def _parse_line(line: str) -> list[Sample]:
    """Raises ValueError, IndexError, OverflowError for a malformed line."""
    plain = _PLAIN_LINE.fullmatch(line)
    if plain is not None:
        name, labels, value = plain.groups()
        return [Sample(name, dict(_PAIR.findall(labels or "")), float(value))]
    found = [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
    return [s._replace(value=float(s.value)) for s in found]  # it reads long numbers as integers


def _add(gpu: GpuSample, sample: Sample, metrics: Metrics) -> GpuSample:
    pod = _pod(sample.labels)
    gpu = replace(
        gpu,
        index=gpu.index or sample.labels.get("gpu", ""),
        pods=gpu.pods | {pod} if pod else gpu.pods,
    )
    value = sample.value
    if not math.isfinite(value) or value >= BLANK_FLOAT:
        return gpu
    if sample.name == ENERGY:
        gpu = replace(gpu, energy=max(value, gpu.energy or 0.0))
    code = _code(sample, metrics.get(sample.name))
    if code is None or value < 0 or (value >= BLANK_INT32 and sample.name != ENERGY):
        return gpu
    return _add_value(gpu, sample.name, code, value)


def _code(sample: Sample, label: str | None) -> int | None:
    """None for a series that no rule reads."""
    if not label:
        return None if label is None else 0
    text = sample.labels.get(label, "")
    return int(text) if _CODE.fullmatch(text) else None


def _add_value(gpu: GpuSample, metric: str, code: int, value: float) -> GpuSample:
    """Series of one GPU may repeat (MIG, shared between pods) with the same meaning, so the largest
    value counts.
    """
    held = gpu.values.get(metric, {})
    largest = {**held, code: max(value, held.get(code, value))}
    return replace(gpu, values={**gpu.values, metric: largest})


def _hostname(sample: Sample) -> str:
    return str(sample.labels.get("Hostname") or sample.labels.get("hostname") or "")


def _pod(labels: Mapping[str, str]) -> str:
    name = labels.get("pod") or labels.get("pod_name") or ""
    namespace = labels.get("namespace") or labels.get("pod_namespace") or ""
    return f"{namespace}/{name}" if name and namespace else ""
