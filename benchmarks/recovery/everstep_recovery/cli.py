"""Arguments, the order of the runs, raw results that a stopped benchmark resumes from, the table."""

import argparse
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from everstep_recovery import environments, plot, results, table, workload
from everstep_recovery.faults import FAULTS
from everstep_recovery.moments import find_phase
from everstep_recovery.processes import RunFailed
from everstep_recovery.running import Plan, play
from everstep_recovery.systems import SYSTEMS, System
from everstep_recovery.table import Row

RESULTS = Path("build/bench/recovery.json")
TABLE = RESULTS.with_suffix(".md")
PICTURE = RESULTS.with_suffix(".png")
LIMIT_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes end, too
    os.environ[workload.LAYERS] = str(options.layers)
    known = {_cell(row) for row in results.read(RESULTS)}
    asked = [s for s in SYSTEMS if s.title in (options.only or ())]
    chosen = asked or [s for s in SYSTEMS if not s.variant and (options.full or not s.dear)]
    runs = [(fault, run) for fault in options.faults for run in range(options.runs)]
    cells = [(s, fault, run) for fault, run in runs for s in chosen if not _why_not(s, fault)]
    random.Random(options.seed).shuffle(cells)
    same = (options.ranks, options.layers)
    left = [c for c in cells if (c[0].title, *same, c[1], c[2]) not in known]
    if len(left) < len(cells):
        print(
            f"{len(cells) - len(left)} of {len(cells)} runs are in {RESULTS} already; delete it to begin anew"
        )
    for name in sorted({system.needs for system, _, _ in left} - {""}):
        environments.make(name)
    for number, (system, fault, run) in enumerate(left, 1):
        print(
            f"{number}/{len(left)}: {system.title}, {options.ranks} ranks, {fault}",
            file=sys.stderr,
            flush=True,
        )
        results.append(RESULTS, _play(system, fault, run, options))
    of_model = [row for row in results.read(RESULTS) if _layers(row) == options.layers]
    _show(of_model, chosen, options)
    return 0


def _why_not(system: System, fault: str) -> str:
    """Why the system does not run the fault; empty if it does."""
    return system.one_node if FAULTS[fault].node else ""


def _show(rows: Sequence[Row], chosen: Sequence[System], options: argparse.Namespace) -> None:
    shown = [r for r in rows if r["ranks"] == options.ranks]
    for fault in options.faults:
        whole, sharded = table.split_by_shard([r for r in shown if r["fault"] == fault])
        if whole:
            print(f"\n{fault}\n{table.build_table(whole)}")
        if sharded:
            print(f"\n{fault}, sharded\n{table.build_table(sharded, table.OURS_SHARDED)}")
        for system in chosen:
            if reason := _why_not(system, fault):
                print(f"not run: {system.title}: {reason}")
    if len(options.faults) > 1:
        print(f"\nall faults\n{table.build_fault_table(shown)}")
    fault = options.faults[0]
    if split := table.build_split_table([r for r in rows if r["fault"] == fault]):
        print(f"\n{fault}: the next step in parts, ms\n{split}")
    first, sharded = table.split_by_shard([r for r in shown if r["fault"] == fault])
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n\n".join(table.build_short_table(r) for r in (first, sharded) if r) + "\n")
    if first:
        plot.draw(PICTURE, first)
    print(f"every run: {RESULTS}; for a README: {TABLE}, {PICTURE}")


def _cell(row: Row) -> tuple[str, int, int, str, int]:
    return table.name(row), row["ranks"], _layers(row), row["fault"], row["run"]


def _layers(row: Row) -> int:
    return int(row.get("layers", workload.FEW_LAYERS))


def _play(system: System, fault: str, run: int, options: argparse.Namespace) -> Row:
    head = {
        "system": system.name, "settings": system.settings, "fault": fault,
        "ranks": options.ranks, "layers": options.layers, "run": run, "problem": "",
    }  # fmt: skip
    plan = Plan(
        ranks=options.ranks,
        limit=options.limit,
        seed=options.seed + run,
        phase=find_phase(run, options.seed),
        fault=fault,
    )
    try:
        cost = play(system, plan)
    except RunFailed as error:
        return {**head, "problem": str(error)}
    return {**head, **asdict(cost), "limit": options.limit}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--layers", type=int, default=workload.FEW_LAYERS, help="of about 1 MiB each, in the model"
    )
    parser.add_argument("--runs", type=int, default=7 if full else 3, help="of each system")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds after a fault")
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        default=list(FAULTS) if full else ["SIGKILL"],
        metavar="FAULT",
        help=", ".join(FAULTS),
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", metavar="SYSTEM", help=", ".join(s.title for s in SYSTEMS)
    )
    options = parser.parse_args(argv)
    options.full = full
    unknown = sorted(set(options.only or ()) - {s.title for s in SYSTEMS})
    if unknown:
        parser.error(
            f"--only {', '.join(unknown)}: known are {', '.join(s.title for s in SYSTEMS)}"
        )
    return options
