"""Finds docker, kind and kubectl, and runs them and helm with a time limit.

If docker or kind is missing, LabError names its installation page.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep_lab import build
from everstep_lab.seam import LabError

_WHERE = {
    "docker": "https://docs.docker.com/engine/install",
    "kind": "https://kind.sigs.k8s.io/docs/user/quick-start",
}


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """Run a command.

    Raises LabError if it does not end in time. With `check`, also raises LabError if it fails, with
    the end of its output.
    """
    words = [str(part) for part in argv]
    shown = " ".join([Path(words[0]).name, *words[1:]])
    try:
        done = subprocess.run(
            words,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=timeout,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{shown}` did not end within {timeout:.0f} s") from None
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-15:]
        raise LabError(f"`{shown}` failed with {done.returncode}:\n" + "\n".join(said))
    return done


def find(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise LabError(
            f"`up --kind` needs {name}, which is not on the PATH: see {_WHERE[name]} (the lab "
            "without --kind needs neither docker nor kind)"
        )
    return found


def check_engine() -> None:
    """Raise LabError if the docker engine cannot be used or kind is missing."""
    done = run([find("docker"), "info", "--format", "{{.ServerVersion}}"], check=False)
    if done.returncode != 0 or not done.stdout.strip():
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LabError(
            f"the docker engine does not answer ({said}): start it, or add your user to the group `docker`"
        )
    find("kind")


def docker(*arguments: str, timeout: float = 60.0, stdin: str | None = None) -> str:
    return run([find("docker"), *arguments], timeout=timeout, stdin=stdin).stdout


def find_kubectl() -> str:
    """The `kubectl` on the PATH, else the lab's own."""
    return shutil.which("kubectl") or str(build.ensure(build.CONTROL_PLANE) / "kubectl")


def list_clusters() -> list[str]:
    return run([find("kind"), "get", "clusters"], check=False).stdout.split()


def list_containers(cluster: str) -> list[str]:
    label = f"label=io.x-k8s.kind.cluster={cluster}"
    return docker("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()
