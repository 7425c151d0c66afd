"""What a reader pod found, for people. Pure."""

from collections.abc import Mapping
from typing import Any

from everstep_kubectl import text

Raw = Mapping[str, Any]


def render_catalog(catalog: Raw) -> str:
    state = "done" if catalog["done"] else "not finished"
    head = f"{catalog['run']} ({state}, last written by {catalog['job'] or 'nobody'})"
    found = catalog["checkpoints"]
    apart = "".join(f"\n{line}" for line in _list_apart(catalog))
    if not found:
        return f"{head}\nthere is no checkpoint yet{apart}"
    rows = [
        [
            c["step"],
            c["epoch"],
            text.size(c["bytes"]),
            c["cause"],
            ", ".join(c.get("pins") or ()) or None,
            "the next start resumes from it" if not k else None,
        ]
        for k, c in enumerate(found)
    ]
    retired = (
        f"\n{text.many(catalog['retired'], 'older checkpoint')} retired"
        if catalog["retired"]
        else ""
    )
    columns = ["STEP", "EPOCH", "SIZE", "EPOCH BEGAN BY", "PINNED AS", "NOTE"]
    return f"{head}\n\n{text.table(columns, rows)}{retired}{apart}"


def _list_apart(catalog: Raw) -> list[str]:
    """Pins of checkpoints that are not in the table, and why the table cannot be trusted."""
    listed = {pin for c in catalog["checkpoints"] for pin in c.get("pins") or ()}
    lines = [
        f"pinned as {pin['name']}: step {pin['step']} of epoch {pin['epoch']}, which the run does not continue"
        for pin in catalog.get("pins") or ()
        if pin["name"] not in listed
    ]
    return lines + ([f"PROBLEM: {catalog['problem']}"] if catalog.get("problem") else [])


def render_verified(found: Raw) -> str:
    lines = [str(found["run"])]
    rows = [[e["epoch"], e["first"], e["last"], e["samples"], e["cause"]] for e in found["epochs"]]
    if rows:
        lines += [
            "",
            text.table(["EPOCH", "FIRST STEP", "LAST STEP", "SAMPLES", "BEGAN BY"], rows),
            "",
        ]
    lines += [f"NOTE: {note}" for note in found.get("notes", [])]
    lines += [f"PROBLEM: {problem}" for problem in found["problems"]]
    if found["ok"]:
        samples = sum(e["samples"] for e in found["epochs"])
        lines.append(
            f"whole: steps 1 to {found['steps']} once each, {samples} samples, none lost or "
            "repeated, every micro-batch by exactly one rank; "
            f"{text.many(found['commits'], 'checkpoint')} kept, the newest "
            f"{text.size(found['bytes'])}, each of its bytes read and checked"
        )
    return "\n".join(lines)
