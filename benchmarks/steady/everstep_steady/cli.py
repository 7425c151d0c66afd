"""Arguments, the order of the runs, the table and the raw results."""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from everstep_steady import launching, tracing, workload
from everstep_steady.launching import Measured
from everstep_steady.statistics_of import pair

SYSTEMS = ("everstep", "everstep exact", "ddp", "ddp again")
"""`everstep exact`: with `exact_reduction`. `ddp again` is the control: its ratio to `ddp` is what the machine
shows without a difference.
"""
RESULTS = Path("build/bench/steady.json")
TRACE = Path("build/bench/steady-trace.json")
TRACE_LAYERS = 64
"""64 MiB of gradients: three buckets."""
Runs = dict[str, list[Measured]]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.trace:
        return trace()
    chance = random.Random(options.seed)
    results: dict[int, Runs] = {}
    for world in options.ranks:
        runs: Runs = {system: [] for system in SYSTEMS}
        for number in range(options.pairs):
            order = list(SYSTEMS)
            chance.shuffle(order)
            for system in order:
                _tell(f"{world} ranks, pair {number + 1} of {options.pairs}: {system}")
                try:
                    found = launching.run(system, world, options.steps)
                except launching.RunFailed as error:
                    print(f"bench-steady: {system} with {world} ranks failed: {error}")
                    return 1
                runs[system].append(found)
        results[world] = runs
        _tell("")
        print(describe(world, runs), flush=True)
    _save(results, options)
    return 0


def trace() -> int:
    """One run of two ranks, with a model of several buckets."""
    path = TRACE.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = {workload.TRACE: str(path), "EVERSTEP_STEADY_LAYERS": str(TRACE_LAYERS)}
    steps = workload.WARM_UP + workload.TRACED_STEPS + 2
    try:
        launching.run("everstep", 2, steps, extra)
    except launching.RunFailed as error:
        print(f"bench-steady: the traced run failed: {error}")
        return 1
    print(tracing.measure_overlap(json.loads(path.read_text())["traceEvents"]))
    print(f"the trace of rank 0, for Perfetto or chrome://tracing: {TRACE}")
    return 0


def describe(world: int, runs: Runs) -> str:
    """One block for a world size: the ratios with their intervals, and the figures behind them."""

    def ratio(system: str, figure: str) -> str:
        ours = [getattr(m, figure) for m in runs[system]]
        return str(pair(ours, [getattr(m, figure) for m in runs["ddp"]]))

    def middle(system: str, figure: str, factor: float) -> str:
        values = sorted(getattr(m, figure) for m in runs[system])
        return f"{values[len(values) // 2] * factor:.1f}"

    rows = [
        f"{world} ranks          wall ×DDP            CPU ×DDP             wall ms  CPU ms  MiB a rank",
    ]
    for system in ("everstep", "everstep exact", "ddp again"):
        figures = [middle(system, f, k) for f, k in _COLUMNS]
        rows.append(
            f"  {system:<14} {ratio(system, 'wall_s'):<21} {ratio(system, 'cpu_s'):<21}"
            f" {figures[0]:>7} {figures[1]:>7} {figures[2]:>10}"
        )
    figures = [middle("ddp", f, k) for f, k in _COLUMNS]
    rows.append(
        f"  {'ddp':<14} {'1':<21} {'1':<21} {figures[0]:>7} {figures[1]:>7} {figures[2]:>10}"
    )
    rows.append(f"  of Everstep's CPU, agents: {middle('everstep', 'agents_cpu_s', 1e3)} ms a step")
    return "\n".join(rows)


_COLUMNS = (("wall_s", 1e3), ("cpu_s", 1e3), ("peak_mib", 1.0))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--pairs", type=int, default=7, help="runs of each system for a world size")
    parser.add_argument("--steps", type=int, default=220, help="of each run, warm-up included")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the runs")
    parser.add_argument(
        "--trace", action="store_true", help="instead: trace three steps, and show the overlap"
    )
    options = parser.parse_args(argv)
    if options.pairs < 2 or options.steps < workload.WARM_UP + 10 or min(options.ranks) < 1:
        parser.error(f"--pairs ≥ 2, --steps ≥ {workload.WARM_UP + 10}, --ranks ≥ 1")
    return options


def _tell(text: str) -> None:
    end = "" if sys.stderr.isatty() else "\n"
    if text or end == "":
        print(f"\r\033[K{text}" if end == "" else text, end=end, file=sys.stderr, flush=True)


def _save(results: dict[int, Runs], options: argparse.Namespace) -> None:
    rows = [
        {"world": world, "system": system, "pair": number, "steps": options.steps, **asdict(found)}
        for world, runs in results.items()
        for system, measured in runs.items()
        for number, found in enumerate(measured)
    ]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1))
    print(f"every run: {RESULTS}")
