"""The report's chart: loss curves of both runs, their difference, the incidents."""

from collections.abc import Sequence
from pathlib import Path

from everstep_contract.ledger import LedgerEntry
from everstep_demo.story import Incident

INK, RUN, REFERENCE, FAULT = "#222222", "#0b6e99", "#e0a030", "#b3261e"


def draw(
    path: Path,
    run: Sequence[LedgerEntry],
    reference: Sequence[LedgerEntry],
    incidents: Sequence[Incident],
) -> None:
    """Write the chart as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(*_curve(reference), color=REFERENCE, linewidth=5, alpha=0.5, label="undisturbed")
    top.plot(*_curve(run), color=RUN, linewidth=1.2, label="two GPUs lost")
    top.set_ylabel("loss (nats per byte)")
    top.set_title("The same job, undisturbed and with two GPUs lost", loc="left", color=INK)
    for incident in incidents:
        _mark(top, incident)
        bottom.axvline(incident.resumed_from, color=FAULT, linewidth=1, linestyle="--")
    top.legend(frameon=False, loc="upper right")
    steps = [e.step for e in run]
    gaps = [abs(a.loss - b.loss) for a, b in zip(run, reference, strict=False)]
    bottom.plot(steps[: len(gaps)], gaps, color=INK, linewidth=1.2)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    if not any(gaps):
        bottom.set_ylim(-1, 1)
        bottom.set_yticks([0])
        bottom.text(
            0.99,
            0.62,
            "zero at every step, to the last bit",
            ha="right",
            transform=bottom.transAxes,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _curve(entries: Sequence[LedgerEntry]) -> tuple[list[int], list[float]]:
    return [e.step for e in entries], [e.loss for e in entries]


def _mark(axes: "object", incident: Incident) -> None:
    """A line at the step from which the job continued, with a description of the fault."""
    axes.axvline(incident.resumed_from, color=FAULT, linewidth=1, linestyle="--")  # type: ignore[attr-defined]
    text = f"act {incident.act.number}: {incident.act.gpu_fault}\nat step {incident.resumed_from}"
    if incident.others_pause is not None:
        text += f", the others paused {incident.others_pause:.1f} s"
    axes.annotate(  # type: ignore[attr-defined]
        text,
        xy=(incident.resumed_from, 0.80 - 0.22 * (incident.act.number - 1)),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=FAULT,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        va="top",
    )
