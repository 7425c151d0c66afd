"""The text of a dcgm-exporter page as values.

Most of a page is of no use here, so a byte filter picks the lines of the fields that the rules name.
Plain lines are read by one expression; what is written in any other way (escapes, odd spaces) or is
wrong goes to prometheus_client's parser, which has the last word. (Measured on a page of 480 series,
132 KB: the parser takes 26 ms for the whole, the filter 0.09 ms; see `benchmarks/exporter_page.py`.)
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

XID = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
"""The name since DCGM 4.6 second; the exporter prints whichever its CSV uses."""
XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
DOUBLE_BIT = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
REMAP_FAILURE = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
FIELDS = (*XID, XID_COUNT, DOUBLE_BIT, REMAP_FAILURE, ENERGY, TEMPERATURE)

BLANK_INT32 = 0x7FFFFFF0
"""DCGM's numbers for "no value" start here (dcgm_structs.h); the exporter leaves such series out,
not all its kin do."""
BLANK_FLOAT = 2.0**47


_LABEL = r'[a-zA-Z_]\w*="[^"\\\n]*"'
_PLAIN_LINE = re.compile(
    rf"(\w+)(?:\{{({_LABEL}(?:,{_LABEL})*)?\}})? ([0-9.eE+-]+|NaN)(?: [0-9]+)?", re.ASCII
)
_PAIR = re.compile(r'(\w+)="([^"]*)"')


class PageError(ValueError):
    """The text is no page of a dcgm-exporter; `empty` if there is none at all."""

    def __init__(self, message: str, *, empty: bool = False) -> None:
        super().__init__(message)
        self.empty = empty


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What one page says of one GPU; None for a field that the exporter does not give."""

    uuid: str
    index: str = ""
    xid: int | None = None
    """The last XID, latched; 0 for none so far."""
    xid_counts: Mapping[int, int] = field(default_factory=dict)
    """Events in the exporter's window (5 minutes), by code."""
    double_bit: float | None = None
    """Uncorrectable ECC errors since the driver was loaded."""
    remap_failed: bool | None = None
    energy: float | None = None
    """Millijoules since the driver was loaded: it grows even when the GPU idles."""
    pods: frozenset[str] = frozenset()
    """"namespace/name"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    gpus: Mapping[str, GpuSample]
    """By UUID."""
    hostname: str = ""
    bad_lines: int = 0


def parse_page(body: bytes) -> Page:
    """Tolerant of lines that cannot be read, as long as others can.

    Raises:
        PageError: nothing there, or not a page of a dcgm-exporter.
    """
    if not body.strip():
        raise PageError("the exporter answered with an empty page", empty=True)
    lines = filter_lines(body)
    samples, bad = _samples(lines)
    if not samples and (bad or b"DCGM_" not in body):
        shown = body[:60].decode(errors="replace").strip()
        raise PageError(f"not a page of a dcgm-exporter: it begins with {shown!r}")
    gpus: dict[str, GpuSample] = {}
    hostname = ""
    for sample in samples:
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid") or ""
        if uuid:
            hostname = hostname or _hostname(sample)
            gpus[uuid] = _add(gpus.get(uuid) or GpuSample(uuid=uuid), sample)
    return Page(gpus=gpus, hostname=hostname, bad_lines=bad)


def filter_lines(body: bytes, names: Iterable[str] = FIELDS) -> bytes:
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
        except ValueError:
            bad += 1
    return samples, bad


def _parse_line(line: str) -> list[Sample]:
    """Raises ValueError for what is no sample."""
    plain = _PLAIN_LINE.fullmatch(line)
    if plain is not None:
        name, labels, value = plain.groups()
        return [Sample(name, dict(_PAIR.findall(labels or "")), float(value))]
    return [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]


def _add(gpu: GpuSample, sample: Sample) -> GpuSample:
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
        return replace(gpu, energy=max(value, gpu.energy or 0.0))
    if value >= BLANK_INT32 or value < 0:
        return gpu
    return _add_count(gpu, sample, value)


def _add_count(gpu: GpuSample, sample: Sample, value: float) -> GpuSample:
    """Series of one GPU may repeat (MIG, shared between pods): they say the same, so the largest
    stands."""
    if sample.name in XID:
        return replace(gpu, xid=max(int(value), gpu.xid or 0))
    if sample.name == DOUBLE_BIT:
        return replace(gpu, double_bit=max(value, gpu.double_bit or 0.0))
    if sample.name == REMAP_FAILURE:
        return replace(gpu, remap_failed=value == 1 or bool(gpu.remap_failed))
    code = sample.labels.get("xid", "")
    if sample.name == XID_COUNT and code.isdigit():
        count = max(int(value), gpu.xid_counts.get(int(code), 0))
        return replace(gpu, xid_counts={**gpu.xid_counts, int(code): count})
    return gpu


def _hostname(sample: Sample) -> str:
    return str(sample.labels.get("Hostname") or sample.labels.get("hostname") or "")


def _pod(labels: Mapping[str, str]) -> str:
    name = labels.get("pod") or labels.get("pod_name") or ""
    namespace = labels.get("namespace") or labels.get("pod_namespace") or ""
    return f"{namespace}/{name}" if name and namespace else ""
