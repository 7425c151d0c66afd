"""Classification of a worker's failure. CUDA error texts are checked against the CUDA library."""

import ctypes
import importlib.util
import signal
from pathlib import Path

import pytest

from everstep_agent.pod import faults
from everstep_contract.report import Cause

TABLE = faults.load_faults()
ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:4, "
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
ASSERT = "CUDA error: device-side assert triggered"
WATCHDOG = "Process group watchdog thread terminated with exception: "


def error(
    message: str,
    *,
    cause: Cause = Cause.USER_ERROR,
    traceback: str = "Traceback …",
    trained: bool = True,
) -> Cause:
    found = faults.classify_error(
        TABLE, cause, message, traceback, fault="RuntimeError at train.py:9", trained=trained
    )
    assert found.fault == "RuntimeError at train.py:9"
    return found.cause


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR2"])
def test_a_signal_from_outside_is_infrastructure_whatever_the_output_says(name: str) -> None:
    found = faults.classify_signal(TABLE, signal.Signals[name], ECC)
    assert (found.cause, found.fault) == (Cause.WORKER_DIED, name)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_a_signal_of_its_own_doing_is_a_crash(name: str) -> None:
    found = faults.classify_signal(TABLE, signal.Signals[name], "Fatal Python error")
    assert (found.cause, found.fault) == (Cause.WORKER_CRASHED, name)


def test_a_signal_that_has_no_name_is_from_outside() -> None:
    assert faults.classify_signal(TABLE, 61, "") == faults.Death(
        cause=Cause.WORKER_DIED, fault="signal 61"
    )


@pytest.mark.parametrize(
    ("last_words", "cause"),
    [
        (WATCHDOG + ECC, Cause.DEVICE_FAILED),
        (
            WATCHDOG + NCCL + "remote process exited or there was a network error",
            Cause.NETWORK_FAILED,
        ),
        (WATCHDOG + ASSERT, Cause.WORKER_CRASHED),
    ],
)
def test_a_library_that_aborts_says_why_on_stderr(last_words: str, cause: Cause) -> None:
    found = faults.classify_signal(TABLE, signal.SIGABRT, f"step 3\n{last_words}\n")
    assert (found.cause, found.fault) == (cause, "SIGABRT")


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (ECC, Cause.DEVICE_FAILED),
        ("CUDA error: unknown error", Cause.DEVICE_FAILED),
        ("CUDA error: no CUDA-capable device is detected", Cause.DEVICE_FAILED),
        (ASSERT, Cause.USER_ERROR),
        ("CUDA error: an illegal memory access was encountered", Cause.USER_ERROR),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Cause.USER_ERROR),
        (
            NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            Cause.DEVICE_FAILED,
        ),
        (
            NCCL
            + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
            + "Last error: Cuda failure 710 'device-side assert triggered'",
            Cause.USER_ERROR,
        ),
        (NCCL + "remote process exited or there was a network error", Cause.NETWORK_FAILED),
        (NCCL + "unhandled system error (run with NCCL_DEBUG=INFO)", Cause.NETWORK_FAILED),
        (NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details)", Cause.USER_ERROR),
        (GLOO + "Connection closed by peer", Cause.NETWORK_FAILED),
        (GLOO + "Read error [127.0.0.1]:8087: Connection reset by peer.", Cause.NETWORK_FAILED),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
            "5000ms for recv operation to complete",
            Cause.NETWORK_FAILED,
        ),
        ("the data set's server says: Connection closed by peer", Cause.USER_ERROR),
        ("", Cause.USER_ERROR),
    ],
)
def test_an_exception_is_looked_up_by_its_text(message: str, cause: Cause) -> None:
    assert error(message) is cause


def test_an_exception_that_wraps_another_is_looked_up_in_the_traceback() -> None:
    assert error("loading failed", traceback=f"{ECC}\n\nDuring handling …") is Cause.DEVICE_FAILED


def test_the_last_exception_counts_before_those_that_it_followed() -> None:
    assert error(ASSERT, traceback=f"{GLOO}\n\nDuring handling …") is Cause.USER_ERROR


def test_a_script_that_never_found_a_gpu_lacks_one_by_mistake() -> None:
    missing = "No CUDA GPUs are available"
    assert error(missing, cause=Cause.SCRIPT_ERROR, trained=False) is Cause.SCRIPT_ERROR
    assert error(missing, cause=Cause.SCRIPT_ERROR, trained=True) is Cause.DEVICE_FAILED
    assert error(ECC, cause=Cause.SCRIPT_ERROR, trained=False) is Cause.DEVICE_FAILED


@pytest.mark.parametrize("cause", [Cause.MISUSE, Cause.NOT_FINITE, Cause.GUARD, Cause.STORE])
def test_what_the_worker_knows_better_stands(cause: Cause) -> None:
    assert error(ECC, cause=cause) is cause


def cuda_texts() -> dict[int, str]:
    """The error texts of torch's CUDA runtime. `cudaGetErrorString` needs no GPU."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in found.submodule_search_locations or ()] if found else []
    paths = [p for place in places for p in place.glob("*/lib/libcudart.so.*")]
    if not paths:
        pytest.skip("torch is installed without CUDA")
    library = ctypes.CDLL(str(paths[0]))
    library.cudaGetErrorString.restype = ctypes.c_char_p
    texts = {n: library.cudaGetErrorString(n).decode() for n in range(1, 1000)}
    return {n: text for n, text in texts.items() if "unrecognized" not in text}


DEVICE = {46, 100, 101, 214, 220, 226, 999}
ON_THE_CODE = {2, 700, 702, 710, 714, 715, 716, 717, 718, 719}


def test_every_error_of_cuda_is_judged_as_meant() -> None:
    texts = cuda_texts()
    found = {n: faults.find_pattern(TABLE, f"CUDA error: {text}") for n, text in texts.items()}
    kinds = {n: line.kind for n, line in found.items() if line is not None}
    device = {n for n, k in kinds.items() if k in (faults.Kind.DEVICE, faults.Kind.ABSENT)}
    code = {n for n, kind in kinds.items() if kind is faults.Kind.CODE}
    assert device == DEVICE
    assert code - {53} == ON_THE_CODE, "53 has the same text as 719 in an older CUDA"


def test_every_line_can_match() -> None:
    for line in TABLE:
        assert faults.find_pattern(TABLE, line.pattern) == line
        assert line.meaning
        assert line.source


def test_a_line_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ValueError, match=r"faults.csv, line 2: .*'disk'"):
        faults.parse_faults(["kind,pattern,meaning,source", "disk,x,y,z"])
