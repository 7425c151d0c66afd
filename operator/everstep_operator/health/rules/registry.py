"""`rules.csv` as values. One line is one rule; its columns:

kind           of the evidence, lower case with dashes; NodeQuarantines and nodes keep it for good
logic          the file in this folder whose `read(Reading) -> Change` finds codes that rise or end
metrics        of dcgm-exporter, separated by spaces; `METRIC/label` if a label's number is the code
reason         of the verdict: one CamelCase word
verdict        leaving: the node is quarantined; suspect: new pods prefer other nodes
outlives_boot  yes: neither a reset nor a reboot clears it, so evidence of an earlier boot is the same evidence
says           the rest of a sentence that begins with "GPU 0 (GPU-…)"

A logic file for metrics with codes may define `describe(code)`. Its text replaces `says`; None
means that the code is no evidence.
"""

import csv
import importlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from types import ModuleType

from everstep_operator.health.rules.reading import Change, Reading
from everstep_operator.values import NodeState

PACKAGE = "everstep_operator.health.rules"
COLUMNS = ("kind", "logic", "metrics", "reason", "verdict", "outlives_boot", "says")
VERDICTS = {"leaving": NodeState.LEAVING, "suspect": NodeState.SUSPECT}
_PATTERNS = {
    "kind": (r"[a-z0-9]+(-[a-z0-9]+)*", "lower case words with dashes"),
    "logic": (r"[a-z][a-z0-9_]*", "the name of a file in health/rules, without .py"),
    "metrics": (r"\w+(/\w+)?( \w+(/\w+)?)*", "METRIC or METRIC/label, with a space between two"),
    "reason": (r"[A-Z][A-Za-z0-9]*", "one CamelCase word"),
    "verdict": ("|".join(VERDICTS), " or ".join(VERDICTS)),
    "outlives_boot": ("yes|no", "yes or no"),
    "says": (r".+", "the rest of a sentence"),
}


class RuleError(ValueError):
    """An invalid table; names the line, the column and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    kind: str
    metrics: Mapping[str, str]
    """Metric → the label whose number is the code; "" for none."""
    reason: str
    state: NodeState
    outlives_boot: bool
    read: Callable[[Reading], Change]
    describe: Callable[[int], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    by_kind: Mapping[str, Rule]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.by_kind.values())

    @property
    def metrics(self) -> dict[str, str]:
        """What must be read from a page."""
        return {metric: label for rule in self for metric, label in rule.metrics.items()}


def load_rules(text: str | None = None) -> Rules:
    """From the given table, else from `rules.csv`. Raises `RuleError`."""
    if text is None:
        text = resources.files(PACKAGE).joinpath("rules.csv").read_text("utf-8")
    table = csv.DictReader(io.StringIO(text))
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise RuleError(f"rules.csv: the first line must be {','.join(COLUMNS)}")
    rules: dict[str, Rule] = {}
    for number, row in enumerate(table, start=2):
        rule = _build(number, row)
        if rule.kind in rules:
            raise RuleError(f"rules.csv line {number}: there is a rule of kind {rule.kind} already")
        rules[rule.kind] = rule
    return Rules(by_kind=rules)


def _build(number: int, row: Mapping[str, str | None]) -> Rule:
    for column, (pattern, meaning) in _PATTERNS.items():
        if not re.fullmatch(pattern, row[column] or ""):
            said = f"{column} is {row[column]!r}: write {meaning}"
            raise RuleError(f"rules.csv line {number}: {said}")
    cells = {column: str(row[column]) for column in COLUMNS}
    logic = _find_logic(number, cells["logic"])
    says = cells["says"]
    return Rule(
        kind=cells["kind"],
        metrics=dict(_split(metric) for metric in cells["metrics"].split(" ")),
        reason=cells["reason"],
        state=VERDICTS[cells["verdict"]],
        outlives_boot=cells["outlives_boot"] == "yes",
        read=logic.read,
        describe=getattr(logic, "describe", lambda code: says),
    )


def _find_logic(number: int, name: str) -> ModuleType:
    try:
        logic = importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError:
        raise RuleError(f"rules.csv line {number}: there is no health/rules/{name}.py") from None
    if not callable(getattr(logic, "read", None)):
        raise RuleError(f"rules.csv line {number}: health/rules/{name}.py has no function read")
    return logic


def _split(metric: str) -> tuple[str, str]:
    name, _, label = metric.partition("/")
    return name, label
