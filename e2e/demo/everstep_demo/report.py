"""report.json and the table at the end, from what was measured. Pure."""

from typing import Any

from everstep_demo.compare import Comparison
from everstep_demo.story import COMMITTED, CORDONED, FIRST_STEP, Incident, Told


def find_problems(told: Told, compared: Comparison) -> list[str]:
    """Why this run is not what Everstep promises; empty: all is right."""
    found = list(told.problems)
    if not told.completed:
        found.append("the job did not reach its end")
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
    lost = sum(i.steps_lost for i in told.incidents)
    if lost:
        found.append(f"{lost} steps lost; none may be")
    found += [
        f"{incident.node} had the fault and is not in quarantine"
        for incident in told.incidents
        if incident.node not in told.quarantined_nodes
    ]
    healthy = set(told.quarantined_nodes) - {i.node for i in told.incidents}
    if healthy:
        found.append(f"healthy nodes are in quarantine: {', '.join(sorted(healthy))}")
    return found


def build_report(told: Told, compared: Comparison) -> dict[str, Any]:
    problems = find_problems(told, compared)
    lost = sum(i.steps_lost for i in told.incidents)
    return {
        "ok": not problems,
        "problems": problems,
        "incidents": [_incident(i) for i in told.incidents],
        "steps": compared.steps,
        "steps_lost": lost,
        "steps_recomputed": lost,
        "samples": compared.samples,
        "samples_lost": compared.samples_lost,
        "samples_repeated": compared.samples_repeated,
        "max_abs_loss_difference": compared.max_abs_loss_difference,
        "quarantined_nodes": list(told.quarantined_nodes),
        "goodput": round(told.goodput, 4),
        "seconds": round(told.seconds, 1),
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
        "resumed_from_step": incident.resumed_from,
        "steps_lost": incident.steps_lost,
    }


def build_table(report: dict[str, Any]) -> str:
    """The summary for people."""
    rows: list[tuple[str, str]] = []
    for number, incident in enumerate(report["incidents"], 1):
        rows.append((f"act {number}", f"{incident['fault']} on {incident['node']}"))
        rows.append(("  fault to cordon", _seconds(incident["fault_to_cordon_s"])))
        rows.append(("  fault to checkpoint committed", _seconds(incident["fault_to_committed_s"])))
        rows.append(("  fault to first new step", _seconds(incident["fault_to_first_new_step_s"])))
        rows.append(("  went on from step", str(incident["resumed_from_step"])))
    rows += [
        ("steps, and samples in them", f"{report['steps']}, {report['samples']}"),
        ("steps lost", str(report["steps_lost"])),
        ("samples lost / repeated", f"{report['samples_lost']} / {report['samples_repeated']}"),
        ("largest difference of a loss", f"{report['max_abs_loss_difference']:g}"),
        ("nodes in quarantine", ", ".join(report["quarantined_nodes"]) or "none"),
        ("goodput", f"{report['goodput']:.1%}"),
    ]
    return "\n".join(f"  {name:<32}{value}" for name, value in rows)


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f} s"
