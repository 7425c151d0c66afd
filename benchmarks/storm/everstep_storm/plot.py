"""The storms as a picture: steps over time, a line for each system."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep_recovery.plot import OURS, PEERS

Row = dict[str, Any]
COLORS = (PEERS, "#c0853a", "#6f8f5a", "#a05a7a")
"""Colors of the peers."""


def choose_colors(titles: Sequence[str]) -> Mapping[str, str]:
    peers = [title for title in titles if not title.startswith("everstep")]
    ours = {title: OURS for title in titles if title not in peers}
    return ours | {title: COLORS[n % len(COLORS)] for n, title in enumerate(peers)}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the picture as a PNG: a panel for each mix of faults."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    played = [row for row in rows if row.get("progress") and row["struck"]]
    mixes = sorted({row["mix"] for row in played})
    if not mixes:
        return
    colors = choose_colors(sorted({row["system"] for row in played}))
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, grid = pyplot.subplots(
        1, len(mixes), figsize=(6 * len(mixes), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, mix in zip(grid[0], mixes, strict=True):
        own = [row for row in played if row["mix"] == mix]
        for row in own:
            axes.plot(row["progress"], color=colors[row["system"]], label=row["system"])
        for struck in own[0]["struck"]:
            axes.axvline(struck["after"], color="#d9d9d9", linewidth=0.6, zorder=0)
        axes.set_title(mix, loc="left")
        axes.set_xlabel("seconds (grey: a fault)")
        axes.legend(frameon=False)
    grid[0][0].set_ylabel("global batches in the final history")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
