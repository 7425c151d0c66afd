"""Arguments, the runs of each system, raw results that a stopped benchmark resumes from, the table."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from everstep_recovery import environments
from everstep_recovery.processes import RunFailed
from everstep_storm import plot, table
from everstep_storm.faults import CALM, DEATHS, MIXED, plan_strikes
from everstep_storm.playing import Plan, Played, play
from everstep_storm.systems import CONTENDERS, Contender
from everstep_storm.table import Row

RESULTS = Path("build/bench/storm.json")
PICTURE = RESULTS.with_suffix(".png")
CALM_SECONDS = 60.0
"""Length of the undisturbed run of a system whose final state is not compared."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes end, too
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    chosen = [c for c in CONTENDERS if not options.only or c.title in options.only]
    cells = [(c, mix) for c in chosen for mix in (CALM, *options.mix)]
    known = {_cell(row) for row in rows}
    left = [cell for cell in cells if (cell[0].title, cell[1], *_size(options)) not in known]
    if len(left) < len(cells):
        print(
            f"{len(cells) - len(left)} of {len(cells)} runs are in {RESULTS}; delete it to begin anew"
        )
    for number, (contender, mix) in enumerate(left, 1):
        said = f"{number}/{len(left)}: {contender.title}, {mix}, {options.ranks} ranks"
        print(said, file=sys.stderr, flush=True)
        rows.append(_run(contender, mix, options))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(rows))
    _show([row for row in rows if _cell(row)[2:] == _size(options)], options)
    return 0


def _size(options: argparse.Namespace) -> tuple[int, float, float, float]:
    return options.ranks, options.seconds, options.every, options.undisturbed


def _cell(row: Row) -> tuple[str, str, int, float, float, float]:
    return row["system"], row["mix"], row["ranks"], row["storm"], row["every"], row["undisturbed"]


def _run(contender: Contender, mix: str, options: argparse.Namespace) -> Row:
    head: Row = {
        "system": contender.title, "mix": mix, "ranks": options.ranks, "storm": options.seconds,
        "every": options.every, "undisturbed": options.undisturbed, "proves": contender.proves,
        "problem": contender.why_not(mix),
    }  # fmt: skip
    if head["problem"]:
        return head
    if contender.system.needs:
        environments.make(contender.system.needs)
    seconds = options.seconds
    strikes = plan_strikes(mix, seconds=seconds, every=options.every, seed=options.seed)
    if mix == CALM:
        seconds = options.undisturbed if contender.proves else min(seconds, CALM_SECONDS)
    try:
        played = play(contender, Plan(ranks=options.ranks, seconds=seconds, strikes=strikes))
    except RunFailed as error:
        return {**head, "problem": f"did not start: {error}"}
    return head | _to_row(played)


def _to_row(played: Played) -> Row:
    row: Row = asdict(played)
    outcome: Row = row.pop("outcome")
    return row | outcome


def _show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    for mix in options.mix:
        print(f"\n{mix}\n{table.build_table(rows, mix)}")
    plot.draw(PICTURE, rows)
    print(f"every run: {RESULTS}; steps over time: {PICTURE}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    titles = [contender.title for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        prog="bench-storm",
        description="Measures how much training is left under repeated faults, with Everstep and other systems.",
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="length of each storm (default 600)"
    )
    parser.add_argument(
        "--every", type=float, default=15.0, help="seconds between two faults (default 15)"
    )
    parser.add_argument(
        "--mix",
        nargs="+",
        choices=(DEATHS, MIXED),
        default=[DEATHS, MIXED],
        help="kinds of storms (default both)",
    )
    parser.add_argument(
        "--undisturbed",
        type=float,
        help="length of Everstep's undisturbed run, whose states are compared (default: --seconds)",
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (default 1)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=titles,
        metavar="SYSTEM",
        help=f"systems (default all): {', '.join(titles)}",
    )
    options = parser.parse_args(argv)
    if options.seconds < options.every or options.every <= 0:
        parser.error("--seconds must be at least --every, and --every above 0: a storm has a fault")
    if options.undisturbed is None:
        options.undisturbed = options.seconds
    if options.undisturbed <= 0:
        parser.error("--undisturbed must be above 0: the run that the storm is compared with")
    return options
