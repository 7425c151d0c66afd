"""The parent process of a container: `python shim.py SPEC FD` writes events as JSON lines to FD.

It replaces containerd's shim and the container's PID namespace. It is a child subreaper, so that
all processes of the container stay its descendants. The main process dies with the shim. When the
main process has ended, the shim kills the rest. When the lab dies, the shim kills all processes of
the container and exits. It writes the container's log in the CRI format. It imports nothing from
this package, because it must start in milliseconds.
"""

import contextlib
import ctypes
import errno
import json
import os
import selectors
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Spec = dict[str, Any]
Pipes = tuple[tuple[str, int], ...]

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def tell(**event: object) -> None:
    with contextlib.suppress(OSError):  # the lab has ended; the shim's death signal follows
        os.write(int(sys.argv[2]), json.dumps(event).encode() + b"\n")


def main() -> int:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    os.set_inheritable(int(sys.argv[2]), False)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if os.getppid() != spec["parent"]:
        return 1
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pid, pipes = start(spec)
    if pid is None:
        return 1
    tell(started=pid)
    return Loop(pid, pipes, wake_read, log).run()


def start(spec: Spec) -> tuple[int | None, Pipes]:
    out, err, failed = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        child(spec, parent, out[1], err[1], failed[1])
    for pair in (out, err, failed):
        os.close(pair[1])
    with os.fdopen(failed[0]) as reader:
        problem = reader.read()
    if problem:
        os.waitpid(pid, 0)
        tell(failed=problem)
        return None, ()
    return pid, (("stdout", out[0]), ("stderr", err[0]))


def child(spec: Spec, parent: int, out: int, err: int, failed: int) -> None:
    """Become the container's main process. Never returns."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        os.chdir(spec["cwd"])
        os.execve(find(spec["argv"][0], spec["env"], spec["cwd"]), spec["argv"], spec["env"])
    except BaseException as problem:
        os.write(failed, explain(spec["argv"][0], problem).encode())
    os._exit(127)


def find(command: str, env: dict[str, str], cwd: str) -> str:
    if "/" in command:
        return os.path.join(cwd, command)
    for folder in env.get("PATH", "").split(":"):
        path = os.path.join(cwd, folder, command)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "executable file not found in $PATH")


def explain(command: str, problem: BaseException) -> str:
    if isinstance(problem, FileNotFoundError) and "/" in command:
        return f'exec: "{command}": stat {command}: no such file or directory'
    text = (problem.strerror if isinstance(problem, OSError) else None) or repr(problem)
    return f'exec: "{command}": {text[:1].lower()}{text[1:]}'


class Loop:
    """Copies output to the log until the main process ends, then kills its descendants."""

    def __init__(self, pid: int, pipes: Pipes, wake: int, log: int) -> None:
        self.pid, self.log, self.wake = pid, log, wake
        self.rest = {name: b"" for name, _ in pipes}
        self.status: int | None = None
        self.selector = selectors.DefaultSelector()
        for name, fd in pipes:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, name)
        self.selector.register(wake, selectors.EVENT_READ, "wake")

    def run(self) -> int:
        while self.status is None:
            for key, _ in self.selector.select():
                self.ready(key.fd, key.data)
        self.kill_rest()
        for key in list(self.selector.get_map().values()):
            while key.data != "wake" and self.copy(key.fd, key.data):
                pass
        for name, rest in self.rest.items():
            if rest:
                self.write(name, rest, b"F")
        code = os.waitstatus_to_exitcode(self.status)
        tell(exited=code if code >= 0 else 128 - code, signal=-code if code < 0 else 0)
        return 0

    def ready(self, fd: int, name: str) -> None:
        if name != "wake":
            if not self.copy(fd, name):
                self.selector.unregister(fd)
            return
        if int(signal.SIGTERM) in os.read(fd, 512):
            self.kill_rest()
        self.reap()

    def copy(self, fd: int, name: str) -> bool:
        """Copy what can be read to the log.

        Returns False at the end of the stream, or if nothing is left to read and the main process
        has ended.
        """
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return self.status is None
        if not chunk:
            return False
        *lines, self.rest[name] = (self.rest[name] + chunk).split(b"\n")
        for line in lines:
            self.write(name, line, b"F")
        if len(self.rest[name]) > 16384:
            self.write(name, self.rest[name], b"P")
            self.rest[name] = b""
        return True

    def write(self, name: str, line: bytes, tag: bytes) -> None:
        nanos = time.time_ns()  # CRI logs have wall-clock times
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nanos // 10**9))
        head = f"{seconds}.{nanos % 10**9:09d}Z {name} ".encode()
        os.write(self.log, head + tag + b" " + line + b"\n")

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def kill_rest(self) -> None:
        """Send SIGKILL to all descendants until none is left. The shim adopts orphans."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            alive = below(os.getpid())
            if not alive:
                return
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.005)


def below(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


if __name__ == "__main__":
    sys.exit(main())
