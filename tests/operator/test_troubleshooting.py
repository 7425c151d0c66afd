"""The troubleshooting page lists every reason that a condition can have."""

import ast
import re
from pathlib import Path

from everstep_agent.coordinator import breaks
from everstep_agent.storage import errors
from everstep_contract.levels import IN_ORDER
from everstep_contract.report import Cause
from everstep_operator.jobs import budgets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "operator" / "TROUBLESHOOTING.md"
JOBS = ROOT / "operator" / "everstep_operator" / "jobs"
SPEAK = ("conditions", "waiting", "failures", "ending", "membership", "plan", "passes")
WORD = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*$")
NO_REASON = frozenset({"NotFailed", "NotFinished", "NotSuspended", "Adopted", "Rescheduled"})
"""Reasons of conditions that are False because there is nothing to report, and causes of attempts
that are not interruptions.
"""
OF_ACTIONS = frozenset({"CheckTemplate", "CreatePod", "Token", "Expired", "Probe", "FormerAttempt"})
ENDS_OF_A_POD = frozenset({"Left", "Stopped"})


def documented() -> set[str]:
    return {
        word
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`([A-Za-z]+)`", line.split("|")[1])
    }


def spoken() -> set[str]:
    found: set[str] = set()
    for name in SPEAK:
        for node in ast.walk(ast.parse((JOBS / f"{name}.py").read_text())):
            if isinstance(node, ast.Call):
                given = [k.value for k in node.keywords if k.arg in ("reason", "cause")]
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                given = node.value.elts[:1]
            else:
                continue
            found |= {
                g.value for g in given if isinstance(g, ast.Constant) and isinstance(g.value, str)
            }
    return {w for w in found if WORD.match(w)}


def store_kinds() -> set[str]:
    kinds, left = set(), [errors.StoreError]
    while left:
        kind = left.pop()
        kinds.add(kind.kind)
        left += kind.__subclasses__()
    return kinds


def test_every_reason_of_a_condition_is_explained():
    causes = {c.value for c in Cause} - ENDS_OF_A_POD
    counted = {cause for causes in budgets.BUDGETS.values() for cause in causes}
    own = {breaks.SAVE_LOST, breaks.REPLICAS_DIFFER, breaks.BELOW_MINIMUM, *IN_ORDER}
    known = causes | counted | own | store_kinds() | spoken()
    assert known - NO_REASON - OF_ACTIONS - documented() == set()


def test_nothing_is_explained_that_nobody_says():
    code = "\n".join(
        p.read_text()
        for folder in (
            "operator/everstep_operator",
            "runtime/everstep_agent",
            "runtime/everstep_contract",
        )
        for p in (ROOT / folder).rglob("*.py")
    )
    kubelet = {"ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"}
    assert {w for w in documented() - kubelet if f'"{w}"' not in code} == set()


def test_the_causes_that_end_a_job_are_all_causes_of_the_report():
    assert {c.value for c in Cause} >= breaks.ENDS_THE_JOB
