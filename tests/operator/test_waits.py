"""The table of waits in operator/README.md agrees with the code."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from everstep_operator import model
from everstep_operator.settings import Settings

OPERATOR = Path(__file__).parents[2] / "operator"
PACKAGE = OPERATOR / "everstep_operator"
HEADING = "## Waits"
LIMIT = re.compile(r"`([^`]+)`(?: \((\d+(?:\.\d+)?) s\)| \((never)\))?")
NO_WAIT = {
    "jobs/disruption.py: TOGETHER_SECONDS": "how far apart losses with one cause may be",
    "jobs/echoes.py: ECHO_SECONDS": "how far apart a death and its verdict may be",
    "jobs/manifests.py: GRACE_SECONDS": "a pod's default grace period",
    "jobs/membership.py: STAMP_SECONDS": "how exact the kubelet's times are",
    "jobs/observed.py: FRESH_SECONDS": "how old figures may be that still say what lives",
    "jobs/passes.py: COUNT_SECONDS": "how long all jobs use one count",
    "lease.py: DEFAULT_SECONDS": "what a Lease without a duration means",
    "model.py: DEFAULT_SAVE_SECONDS": "the interval of saves",
    "silence.py: LEAST_OVERDUE_SECONDS": "how long a lease is unchanged before that means anything",
    "silence.py: DEFAULT_LEASE_SECONDS": "what a node's lease without a duration means",
    "tokens.py: LIFE_SECONDS": "for how long a token is asked for",
    "release_all.py: PAUSE_SECONDS": "between two looks of a command",
    "checkpoint.diskSeconds": "the interval of copies to the disk",
    "checkpoint.everySeconds": "the interval of saves",
    "recovery.replaceAfterSeconds": "its default depends on nodeLostSeconds: model.py: DEFAULT_REPLACE_SECONDS",
    "recovery.maxRedoSeconds": "the interval of near saves",
    "recovery.hangSeconds": "the agents' limit, see runtime/README.md",
    "--figures-seconds": "how often figures are written",
}
"""Durations that are not waits → what they mean."""


def read_rows() -> list[list[str]]:
    text = (OPERATOR / "README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def read_limits() -> list[tuple[str, str]]:
    """Return (name of the limit, its value in the table)."""
    found = [match for _, limit, _ in read_rows() for match in LIMIT.findall(limit)]
    return [(name, seconds or never) for name, seconds, never in found]


def list_constants() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            yield from (
                f"{path.relative_to(PACKAGE)}: {n}" for n in names if n.endswith("_SECONDS")
            )


def list_fields(kind: type[BaseModel], path: str = "") -> Iterator[tuple[str, object]]:
    """Each spec field that is in seconds, with its default."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and name != "template":
            yield from list_fields(inner, f"{path}{field.alias}.")
        elif "Seconds" in str(field.alias):
            yield f"{path}{field.alias}", field.default


def list_flags() -> Iterator[tuple[str, object]]:
    for name, field in Settings.model_fields.items():
        if name.endswith("_seconds"):
            yield f"--{name.replace('_', '-')}", field.default


def value_of(name: str) -> object:
    known = dict([*list_fields(model.JobSpec), *list_flags()])
    if name in known:
        return known[name]
    path, _, attribute = name.partition(": ")
    module = importlib.import_module(
        "everstep_operator." + path.removesuffix(".py").replace("/", ".")
    )
    found: object = module
    for part in attribute.split("."):
        default = getattr(found, "__dataclass_fields__", {}).get(part)
        found = default.default if default is not None else getattr(found, part)
    return max(found) if isinstance(found, tuple) else found


def test_each_row_says_a_wait_a_limit_and_what_follows() -> None:
    rows = [row for row in read_rows() if set(row[0]) != {"-"}]
    assert len(rows) > 30
    assert [row for row in rows if len(row) != 3 or not all(row)] == []


def test_the_limits_are_those_of_the_code() -> None:
    wrong = {}
    for name, says in read_limits():
        value = value_of(name)
        told = None if says == "never" else float(says) if says else "nothing"
        if (None if value is None else float(str(value))) != told:
            wrong[name] = (says, value)
    assert wrong == {}


def test_no_wait_of_the_code_is_missing() -> None:
    told = {name for name, _ in read_limits()}
    fields = {name for name, _ in [*list_fields(model.JobSpec), *list_flags()]}
    assert {*list_constants(), *fields} - told - set(NO_WAIT) == set()
    assert set(NO_WAIT) & told == set()
