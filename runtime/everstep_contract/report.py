"""The exit report: what remains when job and coordinator are gone.

The agent writes it as JSON (at most 4 KB) to the container's termination message and exits with a
code from this file. A final end exits with 0, so that the kubelet does not restart the container;
the report states the cause.
"""

import enum
from dataclasses import dataclass, replace

from everstep_contract import PROTOCOL, codec

LIMIT_BYTES = 4096
MOST_BYTES = 12
"""The most that one character takes in the report's JSON."""


class Cause(enum.Enum):
    DONE = "Done"
    LEFT = "Left"
    STOPPED = "Stopped"
    FENCED = "Fenced"
    USER_ERROR = "UserError"
    SCRIPT_ERROR = "ScriptError"
    """The script could not be started, or ended without training."""
    NOT_FINITE = "LossNotFinite"
    GUARD = "GuardTripped"
    MISUSE = "Misuse"
    STORE = "StoreUnusable"
    RUN_EXISTS = "RunExists"
    CONFIG = "BadConfiguration"
    WORKER_DIED = "WorkerDied"
    """A signal from outside ended the worker (SIGKILL, SIGTERM, …). This counts as a fault of the
    infrastructure, however often it happens.
    """
    WORKER_CRASHED = "WorkerCrashed"
    """A signal that the worker caused itself ended it (SIGSEGV, SIGABRT, SIGBUS, …)."""
    WORKER_HUNG = "WorkerHung"
    NO_PROGRESS = "NoProgress"
    """The worker exceeded the time limit that it has learnt from its own steps, and the others waited for it."""
    DEVICE_FAILED = "DeviceFailed"
    """The worker's error names its GPU: a CUDA or ECC error that code cannot cause."""
    NETWORK_FAILED = "NetworkFailed"
    """A collective failed, and no lost member explains it."""
    PROCESS_STUCK = "ProcessStuck"
    """A worker does not end after SIGKILL. This pod cannot continue; its slot can, in another pod.
    """
    COORDINATOR = "CoordinatorFailed"
    """Coordinator code failed repeatedly: a bug in Everstep."""
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
        Cause.PROCESS_STUCK,
        Cause.COORDINATOR,
    }
)
"""Ends that a restart of the container cannot fix."""

OF_THE_POD = frozenset({Cause.LEFT, Cause.STOPPED, Cause.FENCED, Cause.PROCESS_STUCK})
"""Ends of one pod, not of the job."""

FOUND_ALONE = frozenset({Cause.SCRIPT_ERROR, Cause.MISUSE})
"""Ends that a single agent may find before its ranks are in an epoch. Its report then names no epoch; one that
names an epoch is the coordinator's.
"""

CODE_OR_DATA = frozenset({Cause.USER_ERROR, Cause.WORKER_CRASHED})
"""Causes that end the job when the same fault occurs `SAME_FAULT_LIMIT` times in a row at one step.
Every other cause that a restart can fix is left to the restart budgets: an infrastructure fault
that stops all progress occurs at the same step each time, and is no evidence against the code.
"""
SAME_FAULT_LIMIT = 3

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
    """At most `LIMIT_BYTES`: first the beginning of the traceback is dropped, then the end of the
    message.
    """
    raw = codec.dumps(report)
    while len(raw) > LIMIT_BYTES and report.traceback:
        cut = -(-(len(raw) - LIMIT_BYTES) // MOST_BYTES)
        report = replace(report, traceback=report.traceback[cut:])
        raw = codec.dumps(report)
    while len(raw) > LIMIT_BYTES:
        report = replace(report, message=report.message[: max(0, len(report.message) - 256)])
        raw = codec.dumps(report)
    return raw


def decode(raw: str | bytes) -> ExitReport | None:
    """None for a termination message that Everstep did not write."""
    try:
        return codec.loads(ExitReport, raw)
    except codec.DecodeError:
        return None
