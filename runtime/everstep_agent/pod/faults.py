"""Causes of a worker's death. Pure, except `load_faults`, which reads the table shipped with it.

A signal from outside is no evidence about the code. A signal that the process caused itself, or an
exception, may come from code, data or hardware: error texts of CUDA, NCCL and gloo identify device
and network faults (`faults.csv`, the first matching line counts). The rest follows
`everstep_contract.report.CODE_OR_DATA`.
"""

import csv
import enum
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from everstep_contract.report import Cause

TABLE = "faults.csv"


class Kind(enum.Enum):
    DEVICE = "device"
    ABSENT = "absent"
    """No GPU is present: a device fault in a run that has trained, otherwise a mistake in the pod
    template.
    """
    NETWORK = "network"
    CODE = "code"
    """Code or data; prevents a match with a later, more general line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    kind: Kind
    pattern: str
    """Part of the error's text, case-insensitive."""
    meaning: str
    source: str


Table = Sequence[Pattern]

CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals that a process causes itself; all others come from outside."""
BY_EXCEPTION = frozenset({Cause.USER_ERROR, Cause.SCRIPT_ERROR})
"""Causes of a worker that failed with an exception; only these are looked up in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """`fault` distinguishes two deaths of the same cause: a signal's name, or an exception's type
    and place.
    """

    cause: Cause
    fault: str = ""
    meaning: str = ""
    """From the table."""

    @property
    def names_device(self) -> bool:
        return self.cause is Cause.DEVICE_FAILED


def load_faults() -> Table:
    """Raises ValueError, naming the line, if the table is invalid."""
    text = resources.files("everstep_agent.pod").joinpath(TABLE).read_text("utf-8")
    return parse_faults(text.splitlines())


def parse_faults(lines: Iterable[str]) -> Table:
    reader = csv.DictReader(lines)
    found = []
    for row in reader:
        try:
            found.append(
                Pattern(
                    kind=Kind(row["kind"]),
                    pattern=row["pattern"],
                    meaning=row["meaning"],
                    source=row["source"],
                )
            )
        except (ValueError, KeyError) as error:
            text = f"{TABLE}, line {reader.line_num}: {row!r} is invalid: {error}"
            raise ValueError(text) from None
    return tuple(found)


def find_pattern(table: Table, *texts: str) -> Pattern | None:
    """The first matching line for the first text that matches any."""
    for text in texts:
        lowered = text.lower()
        for line in table:
            if line.pattern.lower() in lowered:
                return line
    return None


def classify_signal(table: Table, number: int, tail: str) -> Death:
    """`tail`: the last lines of the worker's stderr, where libraries write why they abort."""
    name = _name(number)
    if number not in CRASHES:
        return Death(cause=Cause.WORKER_DIED, fault=name)
    line = find_pattern(table, tail)
    if line is not None and line.kind in (Kind.DEVICE, Kind.NETWORK):
        return Death(cause=_CAUSES[line.kind], fault=name, meaning=line.meaning)
    return Death(cause=Cause.WORKER_CRASHED, fault=name)


def classify_error(
    table: Table, cause: Cause, message: str, traceback: str, *, fault: str, trained: bool
) -> Death:
    """`cause`: as the worker reported it; `trained`: the run has applied a step, so script and
    template work.
    """
    if cause not in BY_EXCEPTION:
        return Death(cause=cause, fault=fault)
    line = find_pattern(table, message, traceback)
    if line is None or line.kind is Kind.CODE or (line.kind is Kind.ABSENT and not trained):
        return Death(cause=cause, fault=fault)
    return Death(cause=_CAUSES[line.kind], fault=fault, meaning=line.meaning)


_CAUSES = {
    Kind.DEVICE: Cause.DEVICE_FAILED,
    Kind.ABSENT: Cause.DEVICE_FAILED,
    Kind.NETWORK: Cause.NETWORK_FAILED,
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
