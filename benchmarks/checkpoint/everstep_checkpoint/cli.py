"""Arguments, the order of the runs, the table and the raw results."""

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError

from everstep_checkpoint import chaos, environments, running, workload
from everstep_checkpoint.environments import DLROVER
from everstep_checkpoint.reading import Row
from everstep_checkpoint.running import EVERSTEP, RunFailed, Size

PEERS = (
    "torch.save",
    "dcp.save",
    "dcp thread",
    "dcp thread, tuned",
    "dcp process",
    "dcp process, tuned",
    "torch-checkpointing",
    DLROVER,
)
RESULTS = Path("build/bench/checkpoint.json")
CHAOS = Path("build/bench/chaos")
STEP_SECONDS = 0.27
"""Computation time of a step on one thread: the figures are for steps of 250 ms or more."""
EVERY = 20


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.chaos:
        return _play_chaos(options.chaos)
    chance, rows = random.Random(options.seed), list[Row]()
    for ranks in options.ranks:
        for mib in options.mib:
            size = Size(
                mib=mib,
                ranks=ranks,
                batch=workload.measure_batch(mib, STEP_SECONDS / max(1, ranks / 2)),
                saves=options.saves,
                every=EVERY,
            )
            order = _choose_systems(options.only)
            chance.shuffle(order)
            for system in order:
                print(f"{mib} MiB, {ranks} ranks: {system}", file=sys.stderr, flush=True)
                try:
                    peers = environments.make(environments.find(system))
                    rows.append(running.play(system, size, peers))
                except (RunFailed, CalledProcessError) as error:
                    print(f"bench-checkpoint: {system} failed: {error}", flush=True)
                _save(rows)
            print(describe([r for r in rows if (r.mib, r.ranks) == (mib, ranks)]), flush=True)
    print(f"every run: {RESULTS}")
    return 0 if rows else 1


def _play_chaos(points: int) -> int:
    python = environments.make("ckpt-chaos")
    found = [chaos.play(python, points, resume, CHAOS) for resume in chaos.RESUMES]
    return int(any(found))


def describe(rows: Sequence[Row]) -> str:
    """One block for a size and a number of ranks, the shortest stall first."""
    if not rows:
        return ""
    first = rows[0]
    lines = [
        f"{first.mib} MiB, {first.ranks} ranks, a step of {first.step_ms:.0f} ms, memcpy {first.limit_gbs:.1f} GB/s"
        f"{_describe_tensors(rows)}",
        f"  {'system':<20} {'stall p50':>10} {'p99':>9} {'first':>9} {'added p50':>10} {'p99':>9}"
        f" {'10 steps':>9} {'durable':>8} {'restore':>9} {'memory':>9}",
    ]
    for row in sorted(rows, key=lambda r: r.stall_ms_p50):
        durable = f"{row.durable_s:.2f} s" if row.durable_s is not None else "-"
        restore, memory = _show_speed(row.restore_gbs), _show_speed(row.memory_gbs)
        lines.append(
            f"  {row.system:<20} {row.stall_ms_p50:>7.1f} ms {row.stall_ms_p99:>6.1f} ms {row.first_ms:>6.0f} ms"
            f" {row.added_ms_p50:>7.1f} ms {row.added_ms_p99:>6.1f} ms"
            f" {'× ' + format(row.slowdown, '.3f'):>9} {durable:>8} {restore:>9} {memory:>9}"
        )
    return "\n".join(lines)


def _describe_tensors(rows: Sequence[Row]) -> str:
    found = [row.tensors_gbs for row in rows if row.tensors_gbs is not None]
    return f", tensor by tensor {max(found):.1f} GB/s" if found else ""


def _show_speed(gbs: float | None) -> str:
    return f"{gbs:.1f} GB/s" if gbs is not None else "-"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(
        prog="bench-checkpoint",
        description="Measures what a save costs the steps and how fast a restore is, with Everstep and other systems. "
        "FULL=1 in the environment: all sizes and numbers of ranks.",
    )
    sizes = [64, 256, 1024, 2048] if full else [64, 256]
    parser.add_argument(
        "--mib", type=int, nargs="+", default=sizes, help="sizes of the model in MiB"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4] if full else [1], help="numbers of ranks"
    )
    parser.add_argument(
        "--saves", type=int, default=10, help="number of saves of each run (default 10)"
    )
    parser.add_argument("--only", help="only systems whose name contains this (default all)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the order of the runs (default 1)"
    )
    parser.add_argument(
        "--chaos",
        type=int,
        metavar="POINTS",
        help="run ckpt-chaos instead, with this many kills of each kind",
    )
    options = parser.parse_args(argv)
    if not _choose_systems(options.only):
        parser.error(f"--only {options.only}: known are {', '.join((EVERSTEP, *PEERS))}")
    if options.saves < 4 or min(options.mib) < workload.LAYER_MIB or min(options.ranks) < 1:
        parser.error(f"--saves ≥ 4, --mib ≥ {workload.LAYER_MIB}, --ranks ≥ 1")
    return options


def _choose_systems(only: str | None) -> list[str]:
    """The systems whose name contains `only`; all if there is none."""
    return [system for system in (EVERSTEP, *PEERS) if not only or only in system]


def _save(rows: Sequence[Row]) -> None:
    """Write the results. They replace those of the same systems and sizes; others stay."""
    new = [row.to_document() for row in rows]
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    again = {_key(row) for row in new}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([*(r for r in held if _key(r) not in again), *new], indent=1))


def _key(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["system"], row["mib"], row["ranks"]
