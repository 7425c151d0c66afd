"""The lab's binaries: built once from pinned Go modules, then taken from a cache.

The modules are `controlplane/go.mod`, `objectstore/go.mod` and `helm/go.mod` beside this package.
The cache key is a hash of a module's pins, its linker flags and Go's version. A changed pin
therefore causes a new build; earlier builds are kept. EVERSTEP_LAB_BIN names a folder of ready
binaries. A module with no binary in that folder is built as usual. EVERSTEP_GO names a Go command.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_lab.buildtime import Remaining, share_compiled, shown
from everstep_lab.seam import LabError

HERE = Path(__file__).resolve().parent.parent
GO_MINIMUM = (1, 26)
_VERSION = "k8s.io/component-base/version"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    folder: Path
    title: str
    binaries: tuple[str, ...]
    ldflags: str
    renamed: Mapping[str, str]
    """Maps Go's name for a binary (that of its package) to the lab's name."""
    cold_seconds: float
    """Build time with empty caches, on two idle cores."""


CONTROL_PLANE = Module(
    folder=HERE / "controlplane",
    title="Kubernetes v1.36.3 and etcd",
    binaries=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    ldflags=f"-s -w -X {_VERSION}.gitVersion=v1.36.3 -X {_VERSION}.gitMajor=1"
    f" -X {_VERSION}.gitMinor=36 -X {_VERSION}.gitTreeState=clean",
    renamed={"server": "etcd"},
    cold_seconds=360.0,
)
OBJECT_STORE = Module(
    folder=HERE / "objectstore",
    title="MinIO",
    binaries=("minio",),
    ldflags="-s -w",
    renamed={},
    cold_seconds=180.0,
)
HELM = Module(
    folder=HERE / "helm",
    title="Helm v3.22.0",
    binaries=("helm",),
    ldflags="-s -w -X helm.sh/helm/v3/internal/version.version=v3.22.0"
    + "".join(
        f" -X helm.sh/helm/v3/pkg/{package}.k8sVersion{part}"
        for package in ("chartutil", "lint/rules")
        for part in ("Major=1", "Minor=36")
    ),
    renamed={},
    cold_seconds=120.0,
)


def ensure(module: Module, say: Say = print, environ: Mapping[str, str] = os.environ) -> Path:
    """`ensure_all` for one module."""
    return ensure_all([module], say, environ)[0]


def ensure_all(
    modules: Sequence[Module], say: Say = print, environ: Mapping[str, str] = os.environ
) -> list[Path]:
    """Build missing binaries and report the remaining time. Returns one folder per module.

    Raises:
        LabError: no Go, a failed build (with its last lines), or EVERSTEP_LAB_BIN lacks a binary.
    """
    places = [_find(module, environ) for module in modules]
    missing = [m for m, (_, there) in zip(modules, places, strict=True) if not there]
    remaining = Remaining(work=sum(module.cold_seconds for module in missing))
    for module, (folder, there) in zip(modules, places, strict=True):
        if not there:
            remaining = _build_once(module, folder, remaining, say, environ)
    return [folder for folder, _ in places]


def _find(module: Module, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the folder for the module's binaries, and whether they are in it."""
    ready = environ.get("EVERSTEP_LAB_BIN")
    if ready and (found := _ready_folder(Path(ready), module)):
        return found, True
    folder = cache_root(environ) / cache_key(module, go_version(find_go(environ)))
    return folder, _is_built(module, folder)


def _is_built(module: Module, folder: Path) -> bool:
    return all((folder / name).exists() for name in module.binaries)


def _build_once(
    module: Module, folder: Path, remaining: Remaining, say: Say, environ: Mapping[str, str]
) -> Remaining:
    """Build the module under a lock: one process builds, others that need it wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    took = 0.0
    with _only_builder(folder, say):
        if not _is_built(module, folder):
            took = _build(module, find_go(environ), folder, remaining, say)
    return remaining.after(module.cold_seconds, took)


def ensure_helm(say: Say = print, environ: Mapping[str, str] = os.environ) -> Path:
    """The `helm` on the PATH, or one built from its module. Raises the same errors as `ensure`."""
    found = shutil.which("helm", path=environ.get("PATH"))
    return Path(found) if found else ensure(HELM, say, environ) / "helm"


def cache_root(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "everstep" / "bin"


def cache_key(module: Module, version: str) -> str:
    digest = hashlib.sha256()
    for part in (
        (module.folder / "go.mod").read_bytes(),
        (module.folder / "go.sum").read_bytes(),
        module.ldflags.encode(),
        version.encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def find_go(environ: Mapping[str, str]) -> str:
    """The Go command: EVERSTEP_GO, or `go` on the PATH, or the `go` beside this Python interpreter.

    Raises LabError if none of them is new enough.
    """
    named = environ.get("EVERSTEP_GO")
    beside = str(Path(sys.prefix) / "bin" / "go")
    found = []
    for candidate in [named] if named else [shutil.which("go"), beside]:
        if not candidate or not shutil.which(candidate):
            continue
        version = go_version(candidate)
        if is_new_enough(version):
            return candidate
        found.append(f"{candidate} is {version}")
    looked = f"EVERSTEP_GO={named}" if named else f"the PATH and {beside}"
    seen = "; ".join(found) if found else f"none in {looked}"
    raise LabError(
        f"the lab needs Go 1.26 or newer to build its control plane; found: {seen}. `make setup` "
        "installs one; or set EVERSTEP_GO to one, or EVERSTEP_LAB_BIN to a folder of binaries"
    )


def go_version(go: str) -> str:
    """The version, for example `go1.26.8`; empty if the command does not work."""
    try:
        out = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, timeout=30,
            env={**os.environ, "GOTOOLCHAIN": "local"}, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout.strip()


def is_new_enough(version: str) -> bool:
    match = re.match(r"go(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= GO_MINIMUM


def _ready_folder(folder: Path, module: Module) -> Path | None:
    """Return the folder if it holds all binaries of the module, None if it holds none of them.

    Raises LabError if it holds only some of them, or is not a folder.
    """
    missing = [name for name in module.binaries if not os.access(folder / name, os.X_OK)]
    if len(missing) == len(module.binaries) and folder.is_dir():
        return None
    if missing:
        raise LabError(
            f"EVERSTEP_LAB_BIN={folder} lacks {', '.join(missing)}: put them there, or unset "
            "EVERSTEP_LAB_BIN to build them"
        )
    return folder


@contextlib.contextmanager
def _only_builder(folder: Path, say: Say) -> Iterator[None]:
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that builds {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(module: Module, go: str, folder: Path, remaining: Remaining, say: Say) -> float:
    """Build the module; returns the seconds it took.

    The download of the sources is not included, because it depends on the network.
    """
    left = shown(remaining.left(module.cold_seconds, 0.0, 0.0))
    say(f"building {module.title} (once; {left} for all missing binaries): downloading the sources")
    fetching = _Progress(say, lambda count, seconds: f"fetched {count}")
    total = len(_run_go(go, ["list", "-deps", "tool"], module, fetching))
    started = time.monotonic()

    def tell(count: int, seconds: float) -> str:
        if not count:  # no progress to measure yet: the estimate would only grow
            return "nothing compiled yet: Go reads the sources, or links packages from its cache"
        share = share_compiled(count, total)
        left = shown(remaining.left(module.cold_seconds, share, seconds))
        return f"compiled {count} of up to {total} packages (cached ones are not counted); {left}"

    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        arguments = ["build", "-v", "-trimpath", "-ldflags", module.ldflags, "-o", f"{making}/"]
        _run_go(go, [*arguments, "tool"], module, _Progress(say, tell))
        for theirs, ours in module.renamed.items():
            (making / theirs).rename(making / ours)
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
    took = time.monotonic() - started
    say(f"built {module.title} in {took:.0f} s: {size:.0f} MB in {folder}")
    return took


class _Progress:
    """Counts the lines of Go's standard error and reports progress every few seconds at most."""

    def __init__(self, say: Say, tell: Callable[[int, float], str], every: float = 5.0) -> None:
        """`tell` makes a message from the number of lines and the seconds since the start."""
        self._say, self._tell, self._every = say, tell, every
        self._begun = self._said = time.monotonic()
        self.count = 0

    def line(self) -> None:
        self.count += 1
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            self._say(f"  {self._tell(self.count, now - self._begun)}")


def _run_go(go: str, arguments: list[str], module: Module, progress: _Progress) -> list[str]:
    """Run Go and return its standard output as lines.

    Raises LabError with the last lines of standard error if it fails.
    """
    environ = {
        **os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly",
        "GOTOOLCHAIN": "local", "GOWORK": "off",
    }  # fmt: skip
    process = subprocess.Popen(
        [go, *arguments], cwd=module.folder, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    out: list[str] = []
    reader = threading.Thread(target=out.extend, args=(process.stdout,))
    reader.start()
    try:
        errors = _follow(process, progress)
    except BaseException:
        process.kill()
        raise
    finally:
        reader.join()
        status = process.wait()
    if status != 0:
        tail = "\n".join(errors[-15:])
        raise LabError(f"`go {arguments[0]}` in {module.folder} failed with {status}:\n{tail}")
    return out


def _follow(process: "subprocess.Popen[str]", progress: _Progress) -> list[str]:
    assert process.stderr is not None
    ticking = threading.Event()

    def tick() -> None:
        while not ticking.wait(5.0):
            progress.tick()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    errors = []
    try:
        for line in process.stderr:
            errors.append(line.rstrip())
            progress.line()
    finally:
        ticking.set()
        ticker.join()
    return errors
