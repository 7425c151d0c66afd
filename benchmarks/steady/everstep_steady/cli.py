"""Arguments, the table and the raw results."""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from everstep_steady import tracing, workload
from everstep_steady.interleaving import Runs, Schedule, interleave
from everstep_steady.launching import RunFailed, Running
from everstep_steady.statistics_of import pair

SYSTEMS = ("everstep", "everstep exact", "ddp", "ddp again")
"""`everstep exact`: with `exact_reduction`. `ddp again` is the control: its ratio to `ddp` shows
how much two runs of the same program differ on this machine.
"""
SHARDED = ("everstep", "hsdp", "hsdp again")
"""The same for a sharded model, for which torch's own system is HSDP."""
RESULTS = Path("build/bench/steady.json")
TRACE = Path("build/bench/steady-trace.json")
TRACE_LAYERS = 64
"""64 MiB of gradients: three buckets."""
SHORTEST = 0.2
"""The shortest block that is allowed, in seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.trace:
        return trace()
    chance = random.Random(options.seed)
    schedule = Schedule(starts=options.starts, rounds=options.rounds, seconds=options.seconds)
    rows: list[dict[str, Any]] = []
    for world in options.ranks:
        try:
            runs, peaks = interleave(
                SYSTEMS if options.shard == 1 else SHARDED,
                world,
                schedule,
                chance=chance,
                tell=_tell,
                extra={workload.SHARD: str(options.shard)},
            )
        except RunFailed as error:
            print(f"bench-steady: {world} ranks: {error}")
            return 1
        _tell("")
        print(describe(world, runs, peaks), flush=True)
        rows += [{"shard": options.shard, **row} for row in _list_rows(world, runs, peaks)]
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1))
    print(f"every block: {RESULTS}")
    return 0


def trace() -> int:
    """Trace one run of two ranks, with a model of several buckets."""
    path = TRACE.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = {workload.TRACE: str(path), "EVERSTEP_STEADY_LAYERS": str(TRACE_LAYERS)}
    running = Running("everstep", 2, extra)
    try:
        running.wait_steps(workload.WARM_UP + workload.TRACED_STEPS + 2)
    except RunFailed as error:
        print(f"bench-steady: the traced run failed: {error}")
        return 1
    finally:
        running.end()
    print(tracing.measure_overlap(json.loads(path.read_text())["traceEvents"]))
    print(f"the trace of rank 0, for Perfetto or chrome://tracing: {TRACE}")
    return 0


def describe(world: int, runs: Runs, peaks: Mapping[str, float]) -> str:
    """One block for a world size: the ratios with their intervals, and the figures behind them."""
    base = next(system for system in runs if not system.startswith("everstep"))

    def read(system: str, figure: str) -> list[list[float]]:
        return [[getattr(m, figure) for m in start] for start in runs[system]]

    def ratio(system: str, figure: str) -> str:
        return str(pair(read(system, figure), read(base, figure)))

    def middle(system: str, figure: str) -> float:
        return median(chain(*read(system, figure))) * 1e3

    rows = [
        f"  {system:<14} {ratio(system, 'wall_s'):<21} {ratio(system, 'cpu_s'):<21}"
        f" {middle(system, 'wall_s'):>7.1f} {middle(system, 'cpu_s'):>7.1f} {peaks[system]:>10.0f}"
        for system in runs
    ]
    wall, cpu = f"wall ×{base.upper()}", f"CPU ×{base.upper()}"
    head = f"{world} ranks          {wall:<20} {cpu:<20} wall ms  CPU ms  MiB a rank"
    agents = f"  of Everstep's CPU, agents: {middle('everstep', 'agents_cpu_s'):.1f} ms a step"
    return "\n".join([head, *rows, agents])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-steady",
        description="Compares an undisturbed step under Everstep with the same loop under stock DDP, or with HSDP "
        "(--shard).",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="numbers of ranks (default 2 3 4; with --shard 4)"
    )
    parser.add_argument(
        "--shard",
        type=int,
        default=1,
        help="shard the model over this many ranks, and compare with HSDP",
    )
    parser.add_argument(
        "--starts", type=int, default=6, help="how often all systems are started (default 6)"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="blocks of each system after each start (default 4)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="shortest length of a block (default 1; with --shard 3). Each block holds at least three steps",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the order of the blocks (default 1)"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="trace three steps instead, and show how much of the reduction overlaps the backward pass",
    )
    options = parser.parse_args(argv)
    options.seconds = options.seconds or (1.0 if options.shard == 1 else 3.0)
    options.ranks = options.ranks or ([2, 3, 4] if options.shard == 1 else [4])
    if options.shard < 1 or any(ranks % options.shard for ranks in options.ranks):
        parser.error("--ranks is a whole number of --shard")
    least = min(options.starts, *options.ranks)
    if least < 1 or options.rounds < 2 or options.seconds < SHORTEST:
        parser.error(f"--starts ≥ 1, --rounds ≥ 2, --ranks ≥ 1, --seconds ≥ {SHORTEST}")
    return options


def _tell(text: str) -> None:
    end = "" if sys.stderr.isatty() else "\n"
    if text or end == "":
        print(f"\r\033[K{text}" if end == "" else text, end=end, file=sys.stderr, flush=True)


def _list_rows(world: int, runs: Runs, peaks: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "world": world,
            "system": system,
            "start": start,
            "round": number,
            "peak_mib": peaks[system],
            **asdict(found),
        }
        for system, starts in runs.items()
        for start, measured in enumerate(starts)
        for number, found in enumerate(measured)
    ]
