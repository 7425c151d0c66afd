"""Measure how long it takes to read an exporter's page: parse all of it, or filter it first.

    python benchmarks/exporter_page.py [GPUS]

Prints the medians of 20 runs each, and their ratio.
"""

import statistics
import sys
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from everstep_operator.health import parse
from everstep_operator.health.rules.registry import load_rules

LABELS = (
    'gpu="{i}",UUID="GPU-{i:032x}",pci_bus_id="00000000:{i:02X}:00.0",device="nvidia{i}",'
    'modelName="NVIDIA H100 80GB HBM3",Hostname="node-1",DCGM_FI_DRIVER_VERSION="580.95.05",'
    'container="trainer",namespace="team-a",pod="job-0-1"'
)
FAMILIES = 60
METRICS = load_rules().metrics
FIELDS = (*METRICS, *parse.ALWAYS)


def build_page(gpus: int) -> bytes:
    named = [
        *FIELDS,
        *(f"DCGM_FI_DEV_OTHER_{n}" for n in range(FAMILIES - len(FIELDS))),
    ]
    lines = []
    for name in named:
        lines += [f"# HELP {name} Help.", f"# TYPE {name} gauge"]
        lines += [f"{name}{{{LABELS.format(i=i)}}} {i}" for i in range(gpus)]
    return ("\n".join(lines) + "\n").encode()


def measure(work: Callable[[], object]) -> float:
    """The median time of 20 calls in milliseconds."""
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


def main() -> None:
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    body = build_page(gpus)
    whole = measure(lambda: list(text_string_to_metric_families(body.decode())))
    filtered = measure(lambda: parse.filter_lines(body, FIELDS))
    both = measure(lambda: parse.parse_page(body, METRICS))
    print(f"{gpus} GPUs, {FAMILIES} families, {len(body) / 1000:.0f} KB")
    print(f"whole page through the parser  {whole:8.2f} ms")
    print(f"filter alone                   {filtered:8.2f} ms")
    print(f"filter, parser, values         {both:8.2f} ms   {whole / both:.1f} x faster")


if __name__ == "__main__":
    main()
