"""`timeline -o png`: the timeline as a picture.

The only module that imports matplotlib, which Everstep's extra `lab` installs.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from everstep_kubectl import text
from everstep_kubectl.cluster import ClusterError
from everstep_kubectl.incidents import Incident, Moment
from everstep_kubectl.timeline import describe_cost

COLOURS = {
    "signal": "#8c6bb1", "verdict": "#88419d", "cordon": "#4d004b", "leave": "#3690c0",
    "commit": "#238b45", "left": "#66c2a4", "deleted": "#cb181d", "created": "#fd8d3c",
    "resumed": "#41ab5d", "running": "#005a32",
}  # fmt: skip
OTHER = "#999999"
LABEL_WIDTH = 0.1
"""As a share of the axis."""


def save(job: str, incidents: Sequence[Incident], path: str) -> None:
    """Save the picture. Raises ClusterError if matplotlib is not installed, or does not know the format."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ClusterError(
            "-o png needs matplotlib, which is not installed: pip install matplotlib "
            "(Everstep's extra `lab` has it); -o json and the table need nothing"
        ) from None
    height = 0.8 + 1.9 * len(incidents)
    figure, axes = pyplot.subplots(
        len(incidents), 1, figsize=(11, height), squeeze=False, layout="constrained"
    )
    for axis, incident in zip(axes[:, 0], incidents, strict=True):
        _draw(axis, incident)
    axes[-1, 0].set_xlabel("seconds since the incident began, on the operator's clock")
    figure.suptitle(f"{job}: {text.many(len(incidents), 'incident')}")
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # the name's ending is no format
        raise ClusterError(f"--file {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _draw(axis: Any, incident: Incident) -> None:
    axis.set_title("\n".join(_title(incident)), loc="left", fontsize=8)
    axis.set_yticks([])
    axis.spines[["left", "right", "top"]].set_visible(False)
    for now, after in itertools.pairwise(incident.moments):
        colour = COLOURS.get(now.name, OTHER)
        width = after.seconds - now.seconds
        axis.barh(0, width, left=now.seconds, height=0.4, color=colour, alpha=0.55)
    placed = place_labels(incident.moments)
    for moment, level in placed:
        colour, top = COLOURS.get(moment.name, OTHER), 0.3 + 0.22 * level
        axis.plot([moment.seconds] * 2, [-0.2, top], color=colour, lw=1)
        label = f" {moment.name} {moment.seconds:.1f}"
        axis.annotate(label, (moment.seconds, top), fontsize=8, color=colour, va="center")
    _draw_phases(axis, incident)
    axis.set_xlim(0, _end(incident) * 1.12)
    axis.set_ylim(-0.7, 0.5 + 0.22 * max((level for _, level in placed), default=0))


def _title(incident: Incident) -> list[str]:
    lines = [f"{incident.cause}  {incident.id}  {text.clock(incident.started)}"]
    lines.append(describe_cost(incident.cost))
    if incident.phases:
        told = ", ".join(f"{p.name.replace('_', ' ')} {p.seconds:.1f}" for p in incident.phases)
        lines.append(f"lower bar, seconds on the job's own clock: {told}")
    return lines


def place_labels(moments: Sequence[Moment]) -> list[tuple[Moment, int]]:
    """Each moment with the lowest row in which its label overlaps no other."""
    widest = max((m.seconds for m in moments), default=1.0) or 1.0
    ends: list[float] = []
    placed: list[tuple[Moment, int]] = []
    for moment in moments:
        level = next((k for k, end in enumerate(ends) if end <= moment.seconds), len(ends))
        ends[level : level + 1] = [moment.seconds + LABEL_WIDTH * widest]
        placed.append((moment, level))
    return placed


def _end(incident: Incident) -> float:
    """The last second to show; never 0, because the axis needs a length."""
    total = sum(p.seconds for p in incident.phases)
    return max([total, 0.001, *(m.seconds for m in incident.moments)])


def _draw_phases(axis: Any, incident: Incident) -> None:
    """Draw the job's phases. The job reports only durations, so its bar is placed so that it ends
    with the incident.
    """
    at = _end(incident) - sum(p.seconds for p in incident.phases)
    for k, phase in enumerate(incident.phases):
        axis.barh(-0.45, phase.seconds, left=at, height=0.2, color=f"C{k}", alpha=0.7)
        at += phase.seconds
