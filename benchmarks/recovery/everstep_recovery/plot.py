"""The runs as a picture: a point for each run, on a logarithmic scale of seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
PANELS = (
    ("seconds_to_next_step", "until the survivors' next step"),
    ("seconds_to_full_size", "until the group is whole again"),
)
OURS, PEERS = "#0b6e99", "#8a8f94"


class Point(NamedTuple):
    title: str
    seconds: float
    late: bool
    """It had not happened when the run was stopped after `seconds`."""


def list_points(rows: Sequence[Row], column: str) -> list[Point]:
    """A point for each run that started."""
    return [
        Point(f"{r['system']} {r['settings']}", r["limit"], late=True)
        if r[column] is None
        else Point(f"{r['system']} {r['settings']}", r[column], late=False)
        for r in rows
        if not r["problem"]
    ]


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the picture as a PNG; the fastest system is at the top."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    order = _order(list_points(rows, PANELS[0][0]))
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = pyplot.subplots(
        1, len(PANELS), figsize=(10, 0.9 + 0.45 * len(order)), sharex=True, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axes, (column, title) in zip(panels, PANELS, strict=True):
        for point in list_points(rows, column):
            color = OURS if point.title.startswith("everstep") else PEERS
            axes.plot(
                point.seconds, order.index(point.title), ">" if point.late else "o", color=color,
                alpha=0.75, markersize=7, fillstyle="none" if point.late else "full",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title, loc="left")
        axes.set_xlabel("seconds after the kill (▷: not yet)")
        axes.grid(axis="x", which="major", alpha=0.3)
    panels[0].set_yticks(range(len(order)), order)
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _order(points: Sequence[Point]) -> list[str]:
    """Titles, by the median of their seconds."""
    seconds: dict[str, list[float]] = {}
    for point in points:
        seconds.setdefault(point.title, []).append(point.seconds)
    return sorted(seconds, key=lambda title: sorted(seconds[title])[len(seconds[title]) // 2])
