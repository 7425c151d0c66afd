"""Builds report.json and the final table from the measurements. Pure."""

from typing import Any

from everstep_demo.compare import Comparison
from everstep_demo.story import COMMITTED, CORDONED, FIRST_STEP, FULL_SIZE, Incident, Measured


def find_problems(measured: Measured, compared: Comparison) -> list[str]:
    """The checks that failed; empty if all passed."""
    found = list(measured.problems)
    if not measured.completed:
        found.append("the job did not complete")
    if compared.steps == 0:
        found.append("the ledger is empty")
    if compared.samples_lost or compared.samples_repeated:
        found.append(
            f"{compared.samples_lost} samples lost, {compared.samples_repeated} repeated; "
            "both must be 0"
        )
    if not compared.same_order or compared.max_abs_loss_difference != 0.0:
        found.append(
            f"the ledgers differ from step {compared.first_difference} on, losses by up to "
            f"{compared.max_abs_loss_difference:g}; they must be equal to the last bit"
        )
    found += _find_in_logs(measured)
    found += [f"the final checkpoints differ: {text}" for text in measured.tensor_differences[:5]]
    if not measured.tensors:
        found.append("the final checkpoint holds no tensors")
    found += [
        f"{incident.node} had the fault and is not in quarantine"
        for incident in measured.incidents
        if incident.node not in measured.quarantined_nodes
    ]
    healthy = set(measured.quarantined_nodes) - {i.node for i in measured.incidents}
    if healthy:
        found.append(f"healthy nodes are in quarantine: {', '.join(sorted(healthy))}")
    return found


def _find_in_logs(measured: Measured) -> list[str]:
    """Problems that the training script's own log shows."""
    found, logs = [], measured.logs
    unknown = [i.act.number for i in measured.incidents if i.steps_lost is None]
    if unknown:
        found.append(f"the steps lost in acts {unknown} are unknown")
    if lost := _steps_lost(measured):
        found.append(f"{lost} steps lost; it must be 0")
    if logs.recomputed:
        found.append(f"steps {list(logs.recomputed)} were applied more than once by one rank")
    if logs.missing:
        found.append(f"steps {list(logs.missing)} are in no rank's log")
    if logs.other_losses:
        found.append(
            f"the script's losses differ from the undisturbed run's in steps {list(logs.other_losses)}"
        )
    return found


def _steps_lost(measured: Measured) -> int:
    return sum(i.steps_lost or 0 for i in measured.incidents)


def build_report(measured: Measured, compared: Comparison) -> dict[str, Any]:
    problems = find_problems(measured, compared)
    return {
        "ok": not problems,
        "problems": problems,
        "incidents": [_incident(i) for i in measured.incidents],
        "steps": compared.steps,
        "steps_lost": _steps_lost(measured),
        "steps_recomputed": len(measured.logs.recomputed),
        "samples": compared.samples,
        "samples_lost": compared.samples_lost,
        "samples_repeated": compared.samples_repeated,
        "max_abs_loss_difference": compared.max_abs_loss_difference,
        "tensors_compared": measured.tensors,
        "tensors_that_differ": len(measured.tensor_differences),
        "quarantined_nodes": list(measured.quarantined_nodes),
        "goodput": round(measured.goodput, 4),
        "seconds": round(measured.seconds, 1),
    }


def _incident(incident: Incident) -> dict[str, Any]:
    reached = {k: round(v, 2) for k, v in incident.reached.items()}
    return {
        "fault": incident.act.gpu_fault,
        "node": incident.node,
        "moved_to": incident.moved_to,
        "fault_to_cordon_s": reached.get(CORDONED),
        "fault_to_committed_s": reached.get(COMMITTED),
        "fault_to_first_new_step_s": reached.get(FIRST_STEP),
        "fault_to_full_size_s": reached.get(FULL_SIZE),
        "longest_pause_of_the_others_s": _rounded(incident.others_pause),
        "usual_step_s": _rounded(incident.usual_pause),
        "usual_step_of_the_others_s": _rounded(incident.shrunk_pause),
        "resumed_from_step": incident.resumed_from,
        "steps_lost": incident.steps_lost,
        "steps_recomputed": incident.steps_recomputed,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def build_table(report: dict[str, Any]) -> str:
    """The summary for the terminal."""
    rows: list[tuple[str, str]] = []
    for number, incident in enumerate(report["incidents"], 1):
        rows.append((f"act {number}", f"{incident['fault']} on {incident['node']}"))
        rows.append(("  fault to cordon", _seconds(incident["fault_to_cordon_s"])))
        if incident["fault_to_committed_s"] is not None:
            committed = _seconds(incident["fault_to_committed_s"])
            rows.append(("  fault to checkpoint committed", committed))
        rows.append(("  fault to first new step", _seconds(incident["fault_to_first_new_step_s"])))
        rows.append(("  fault to full size again", _seconds(incident["fault_to_full_size_s"])))
        rows.append(("  longest pause of the others", _describe_pause(incident)))
        rows.append(("  continued from step", str(incident["resumed_from_step"])))
    rows += [
        ("steps, and samples in them", f"{report['steps']}, {report['samples']}"),
        ("steps lost / recomputed", f"{report['steps_lost']} / {report['steps_recomputed']}"),
        ("samples lost / repeated", f"{report['samples_lost']} / {report['samples_repeated']}"),
        ("largest difference in losses", f"{report['max_abs_loss_difference']:g}"),
        ("tensors of the last checkpoint", _tensors(report)),
        ("nodes in quarantine", ", ".join(report["quarantined_nodes"]) or "none"),
        ("goodput", f"{report['goodput']:.1%}"),
    ]
    return "\n".join(f"  {name:<32}{value}" for name, value in rows)


def _tensors(report: dict[str, Any]) -> str:
    count, other = report["tensors_compared"], report["tensors_that_differ"]
    return f"{count}, {other} differ" if other else f"{count}, all equal to the last byte"


def _describe_pause(incident: dict[str, Any]) -> str:
    pause, usual = incident["longest_pause_of_the_others_s"], incident["usual_step_s"]
    if pause is None or usual is None:
        return "unknown"
    alone = incident["usual_step_of_the_others_s"]
    shown = "" if alone is None else f", {alone:.2f} s with one worker less"
    return f"{pause:.2f} s between two steps; a step takes {usual:.2f} s{shown}"


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f} s"
