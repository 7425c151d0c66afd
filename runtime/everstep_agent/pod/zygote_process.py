"""The zygote's program: it imports what workers import, then forks a worker for each request.

It is run by its path. Its arguments are the script and the script's arguments (so `ps` shows them),
its stdin is the agent's socket. It imports only the standard library and the modules that the agent
names. A request is one byte with three descriptors: a socket to the agent, and the worker's stdout
and stderr. The worker talks to the agent only over that socket:

    agent → worker   its environment, a line of JSON
    worker → agent   {"pid": …}, once it is the agent's child; or {"refused": reason}
    agent → worker   one byte: go. Without it the worker ends before it runs any of the user's code

A worker is forked twice. An intermediate process is forked ahead and waits for the request. It
forks the worker and ends, so that the kernel reparents the worker to the agent (a subreaper), which
can then wait for it. `clone` with CLONE_PARENT would do the same in one step, but without the fork
handlers of libc, Python and the libraries.
"""

import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NAME = "everstep-zygote"
"""Name in `ps` and `top`; the kernel keeps 15 bytes. Workers have the name of the interpreter."""
ADOPTION_SECONDS = 5.0
"""Limit for the kernel to reparent a worker to the agent."""
PAUSE_SECONDS = 0.5
"""Pause after a fork that failed."""
OVER = 3
"""Exit status of the intermediate process: the agent has closed the connection."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""A process that holds one of them has initialised a driver, which does not survive a fork."""


def become_worker() -> tuple[CodeType, dict[str, Any]]:
    """The script, and the namespace to run it in. Returns only in a worker."""
    _set_name(NAME)
    control = _take_control()
    order = json.loads(_read_line(control))
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[1]))
    problems = [p for name in order["modules"] if (p := warm_up(name)) is not None]
    _end_idle_threads()
    gc.collect()
    control.sendall(json.dumps({"problems": problems}).encode() + b"\n")
    reply = _serve(control)
    _enter(reply, order["agent"])
    return _prepare_script(sys.argv[1], sys.argv[2:])


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(name), 0, 0, 0)


def warm_up(name: str) -> dict[str, str] | None:
    """Import a module. Returns None, or what went wrong; the traceback goes to stderr."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit too: a module's fault must not end the zygote
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        if not missing:
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {"module": name, "error": text, "missing": "yes" if missing else ""}
    return None


def find_obstacle() -> str:
    """Why this process must not be forked; empty: nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it has {threads} threads, and their locks would stay locked in a fork"
    initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    if initialized is not None and initialized():
        return "CUDA is initialised in it, which does not survive a fork"
    for number in _list_descriptors():
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(DEVICES):
                return (
                    f"it holds {path}: a driver is initialised in it, which does not survive a fork"
                )
    return ""


# --- in the zygote -------------------------------------------------------------------------------


def _take_control() -> socket.socket:
    """The agent's socket. stdin, which it was, becomes /dev/null."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    return control


def _read_line(connection: socket.socket) -> bytes:
    """Read one line. Ends the process if the other side is gone."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        if not chunk:
            os._exit(0)
        line += chunk
    return line


def _end_idle_threads() -> None:
    """End idle threads with one fork. OpenBLAS starts threads when numpy is imported, and ends them
    itself before a fork. It starts them again when they are needed.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _serve(control: socket.socket) -> socket.socket:
    """Returns in each worker, with its socket to the agent."""
    zygote = os.getpid()
    while True:
        if obstacle := find_obstacle():
            reply, *outputs = _take_request(control)
            with socket.socket(fileno=reply) as connection:
                _refuse(connection, obstacle)
            _close(outputs)
            continue
        middle = _fork()
        if middle == 0:
            _die_with(zygote)
            return _fork_worker(control)
        _, status = os.waitpid(middle, 0)
        if os.waitstatus_to_exitcode(status) == OVER:
            os._exit(0)
        if status != 0:
            time.sleep(PAUSE_SECONDS)


def _take_request(control: socket.socket) -> list[int]:
    """Three descriptors: a socket to the agent, and the worker's stdout and stderr."""
    byte, numbers, _, _ = socket.recv_fds(control, 1, 3)
    if not byte:
        os._exit(OVER)
    return numbers


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # no collection in a worker writes to these objects, so their pages stay shared
    while True:
        try:
            return os.fork()
        except OSError as error:
            print(f"the zygote cannot fork: {error}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)


def _fork_worker(control: socket.socket) -> socket.socket:
    """Wait for a request. Returns in its worker, and ends this process."""
    reply, *outputs = _take_request(control)
    connection = socket.socket(fileno=reply)
    try:
        worker = os.fork()
    except OSError as error:
        _refuse(connection, f"it cannot fork: {error}")
        os._exit(1)
    if worker:
        os._exit(0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    _close(outputs)
    control.close()
    return connection


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def _refuse(reply: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        reply.sendall(json.dumps({"refused": reason}).encode() + b"\n")


# --- in the worker -------------------------------------------------------------------------------


def _enter(reply: socket.socket, agent: int) -> None:
    """Become the agent's child, and keep nothing of the zygote but its memory."""
    os.setsid()
    _set_name(os.path.basename(sys.executable))
    _close_descriptors(reply.fileno())
    _die_with(agent)
    environ = json.loads(_read_line(reply))
    poisoned = getattr(sys.modules.get("torch.cuda"), "_is_in_bad_fork", None)
    if poisoned is not None and poisoned():
        _refuse(reply, "CUDA was used in it, which does not survive a fork")
        os._exit(1)
    reply.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    if not reply.recv(1):
        os._exit(1)
    reply.close()
    os.environ.clear()
    os.environ.update(environ)
    _seed()


def _die_with(parent: int) -> None:
    """Wait until this process is the child of `parent`, and arrange that it gets SIGKILL when
    `parent` ends. If `parent` has ended already, exit now.
    """
    limit = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != parent:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _close_descriptors(but: int) -> None:
    """Replace the descriptors that a preloaded module has open by /dev/null. The module may still
    use or close their numbers, so these must not become files of the worker.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in _list_descriptors():
        if number > 2 and number not in (but, null):
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _list_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return found


def _seed() -> None:
    """Two workers of one zygote must not draw the same numbers. (`random` does this itself.)"""
    for module, seed in (("numpy.random", "seed"), ("torch", "default_generator.seed")):
        found: Any = sys.modules.get(module)
        for name in seed.split("."):
            found = getattr(found, name, None)
        if found is not None:
            found()


def _prepare_script(script: str, args: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """The script's code and its namespace, set up as by `python SCRIPT ARGS…`."""
    sys.argv = [script, *args]
    sys.orig_argv = [sys.executable, script, *args]
    sys.excepthook = _show_exception
    path = os.path.abspath(script)
    main = ModuleType("__main__")
    vars(main).update(
        __builtins__=builtins,
        __cached__=None,
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as multiprocessing has both
    return compile(_read_script(path), path, "exec", dont_inherit=True), vars(main)


def _read_script(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        _give_up(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        )


def _give_up(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _show_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an exception as the interpreter does, without this file's frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    exec(*become_worker())
