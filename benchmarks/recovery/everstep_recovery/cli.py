"""Arguments, the order of the runs, raw results that a stopped benchmark resumes from, the table."""

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from everstep_recovery import environments, plot
from everstep_recovery.running import FAULTS, Plan, RunFailed, play
from everstep_recovery.systems import SYSTEMS, System

RESULTS = Path("build/bench/recovery.json")
PICTURE = RESULTS.with_suffix(".png")
LIMIT_SECONDS = 120.0
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes end, too
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {_cell(row) for row in rows}
    asked = [s for s in SYSTEMS if s.title in (options.only or ())]
    chosen = asked or [s for s in SYSTEMS if options.full or not s.dear]
    runs = [(fault, run) for fault in options.faults for run in range(options.runs)]
    cells = [(system, fault, run) for fault, run in runs for system in chosen]
    random.Random(options.seed).shuffle(cells)
    left = [c for c in cells if (c[0].title, options.ranks, c[1], c[2]) not in known]
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
        rows.append(_play(system, fault, run, options))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1))
    shown = [r for r in rows if r["ranks"] == options.ranks]
    for fault in options.faults:
        print(f"\n{fault}\n{build_table([r for r in shown if r['fault'] == fault])}")
    plot.draw(PICTURE, [r for r in shown if r["fault"] == options.faults[0]])
    print(f"every run: {RESULTS}; as a picture: {PICTURE}")
    return 0


def _cell(row: Row) -> tuple[str, int, str, int]:
    return f"{row['system']} {row['settings']}".strip(), row["ranks"], row["fault"], row["run"]


def _play(system: System, fault: str, run: int, options: argparse.Namespace) -> Row:
    head = {
        "system": system.name, "settings": system.settings, "fault": fault,
        "ranks": options.ranks, "run": run, "problem": "",
    }  # fmt: skip
    plan = Plan(ranks=options.ranks, limit=options.limit, seed=options.seed + run, fault=fault)
    try:
        cost = play(system, plan)
    except RunFailed as error:
        return {**head, "problem": str(error)}
    return {**head, **asdict(cost), "limit": options.limit}


_COLUMNS = (
    ("seconds_to_next_step", "next step, s"),
    ("seconds_to_full_size", "full size, s"),
    ("steps_lost", "steps taken again"),
    ("samples_lost", "samples lost"),
    ("samples_repeated", "samples repeated"),
)


def build_table(rows: Sequence[Row]) -> str:
    """One line per system: the median (minimum to maximum) of its runs.

    × is the first column divided by Everstep's.
    """
    titles = list(dict.fromkeys(_cell(row)[0] for row in rows))
    own = [r for r in rows if r["system"] == "everstep" and r["settings"] == "in place"]
    ours = _values(own, "seconds_to_next_step")
    head = ["system", "runs", *(title for _, title in _COLUMNS), "×"]
    lines = [head, ["---"] * len(head)]
    for title in sorted(titles):
        own = [r for r in rows if _cell(r)[0] == title]
        values = _values(own, "seconds_to_next_step")
        ratio = f"{median(values) / median(ours):.2f}" if values and ours else ""
        lines.append([title, str(len(own)), *(_describe(own, c) for c, _ in _COLUMNS), ratio])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _values(rows: Sequence[Row], column: str) -> list[float]:
    return [row[column] for row in rows if row.get(column) is not None]


def _describe(rows: Sequence[Row], column: str) -> str:
    played = [row for row in rows if not row["problem"]]
    never = next((s.never_whole for s in SYSTEMS if rows and s.title == _cell(rows[0])[0]), "")
    if never and column == "seconds_to_full_size":
        return f"never: {never}"
    values = _values(played, column)
    late = len(played) - len(values)
    parts = []
    if values:
        low, middle, high = min(values), median(values), max(values)
        parts.append(f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g}–{high:.3g})")
    if late:
        parts.append(f"{late} not within {played[0]['limit']:.0f} s")
    if failed := len(rows) - len(played):
        parts.append(f"{failed} did not start")
    return "; ".join(parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    full = bool(os.environ.get("FULL"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
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
