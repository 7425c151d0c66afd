"""The exit report: what remains when job and coordinator are gone.

The agent writes it as JSON (at most 4 KB) to the container's termination message and exits with a code of this file.
An end for good exits 0, so that the kubelet does not loop; the report says which end it was.
"""

import enum
from dataclasses import dataclass, replace

from everstep_contract import PROTOCOL, codec

LIMIT_BYTES = 4096


class Cause(enum.Enum):
    DONE = "Done"
    LEFT = "Left"
    STOPPED = "Stopped"
    FENCED = "Fenced"
    USER_ERROR = "UserError"
    SCRIPT_ERROR = "ScriptError"
    """The script could not be started, or ended without ever training."""
    NOT_FINITE = "LossNotFinite"
    GUARD = "GuardTripped"
    MISUSE = "Misuse"
    STORE = "StoreUnusable"
    RUN_EXISTS = "RunExists"
    CONFIG = "BadConfiguration"
    WORKER_DIED = "WorkerDied"
    WORKER_HUNG = "WorkerHung"
    AGENT = "AgentError"


FOR_GOOD = frozenset(
    {
        Cause.DONE,
        Cause.LEFT,
        Cause.STOPPED,
        Cause.FENCED,
        Cause.USER_ERROR,
        Cause.SCRIPT_ERROR,
        Cause.NOT_FINITE,
        Cause.GUARD,
        Cause.MISUSE,
        Cause.STORE,
        Cause.RUN_EXISTS,
        Cause.CONFIG,
    }
)
"""Ends that a restart of the container cannot mend."""

EXIT_FOR_GOOD = 0
EXIT_TRY_AGAIN = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    protocol: int = PROTOCOL
    cause: Cause
    message: str
    slot: int = 0
    attempt: int = 0
    incarnation: int = 0
    rank: int | None = None
    epoch: int = 0
    step: int = 0
    traceback: str = ""
    done: bool = False

    def exit_code(self) -> int:
        return EXIT_FOR_GOOD if self.cause in FOR_GOOD else EXIT_TRY_AGAIN


def encode(report: ExitReport) -> bytes:
    """At most `LIMIT_BYTES`: the head of the traceback goes first, then the tail of the message."""
    raw = codec.dumps(report)
    while len(raw) > LIMIT_BYTES and report.traceback:
        cut = max(1, len(raw) - LIMIT_BYTES)
        report = replace(report, traceback=report.traceback[cut:])
        raw = codec.dumps(report)
    while len(raw) > LIMIT_BYTES:
        report = replace(report, message=report.message[: max(0, len(report.message) - 256)])
        raw = codec.dumps(report)
    return raw


def decode(raw: str | bytes) -> ExitReport | None:
    """None for a termination message that is not ours."""
    try:
        return codec.loads(ExitReport, raw)
    except codec.DecodeError:
        return None
