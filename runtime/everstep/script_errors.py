"""What an exception of the script shows: its traceback without Everstep's own frames, and the script's line."""

import os
import sysconfig
import traceback

from everstep.errors import EverstepError

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_GROUP = (
    "Everstep forms the ranks' process group itself and sums the gradients. torch has no group in a job of one rank, "
    "nor in a rank that joins, before its first step: use job.rank and job.world_size, add with job.sum, and leave "
    "out init_process_group and DistributedDataParallel"
)
_SCALER = (
    "within the loop over step.batches there is no gradient yet: call the scaler's step and update after the loop, "
    "once for each step"
)
_FIXES = {
    "Default process group has not been initialized": _GROUP,
    "Error initializing torch.distributed using env://": _GROUP,
    "trying to initialize the default process group twice": _GROUP,
    "No inf checks were recorded": _SCALER,
}
"""What to do if torch raises an error with this text."""
TEXT_CHARACTERS = 1500
"""How much of an exception's text is reported. Some have a whole tensor or command in it; the log has all of it."""


def describe_error(error: BaseException) -> str:
    """What happened, in which line of the script, and the fix if it is known."""
    if isinstance(error, EverstepError):
        return f"{error}{describe_line(error)}"
    fix = next((f"; {fix}" for text, fix in _FIXES.items() if text in str(error)), "")
    text = str(error)
    shown = text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]} …"
    return f"{type(error).__name__}: {shown}{describe_line(error)}{fix}"


def format_error(error: BaseException) -> str:
    """Format the exception as Python does.

    An `EverstepError` is about the script, so no frame of Everstep is shown. Of any other exception
    only the frames above the script's are left out: what lies below may be a fault of Everstep.
    """
    shown = traceback.TracebackException.from_exception(error)
    _leave_out(shown, everywhere=isinstance(error, EverstepError))
    return "".join(shown.format())


def _leave_out(shown: traceback.TracebackException, *, everywhere: bool) -> None:
    others = [number for number, frame in enumerate(shown.stack) if not _is_own(frame)]
    if others:
        kept = others if everywhere else range(others[0], len(shown.stack))
        shown.stack[:] = [shown.stack[number] for number in kept]
    for earlier in (shown.__cause__, shown.__context__):
        if earlier is not None:
            _leave_out(earlier, everywhere=everywhere)


def describe_line(error: BaseException) -> str:
    """` (train.py:12)`: the innermost line that is neither Everstep's nor of an installed package;
    empty: there is none.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_of_the_script(f)]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN)


def _is_of_the_script(frame: traceback.FrameSummary) -> bool:
    elsewhere = frame.filename.startswith((*_INSTALLED, "<"))
    return not elsewhere and not _is_own(frame)
