"""The parts of the Helm chart that the lab installs unchanged: rights, policies and CRDs.

In the lab the operator is a process on this machine. The chart's Deployment, Secret and hooks are
therefore left out. The rights and policies are rendered once into files beside this package, so
that a lab needs no Helm. `python -m everstep_lab.chart` renders the files with Helm. With `--check`
it only compares them; a test of the chart does the same.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep_lab import build
from everstep_lab.seam import LabError

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "charts" / "everstep"
RENDERED = REPOSITORY / "e2e" / "lab" / "rendered"
RELEASE = "everstep"
NAMESPACE = "everstep-system"
KUBERNETES = "1.36.3"
RIGHTS = (
    "serviceaccounts.yaml",
    "rbac-jobs.yaml",
    "rbac-nodes.yaml",
    "rbac-users.yaml",
    "policy-jobs.yaml",
    "policy-authors.yaml",
)
NODES = "policy-nodes.yaml"
"""The only template that differs between an armed and an observe-only operator."""
INSTALLED = ("crds.yaml", *RIGHTS, NODES)
_NAMESPACE = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
_HEAD = "# Rendered from charts/everstep; written by `python -m everstep_lab.chart`.\n"


def read_installed(*, observe_only: bool) -> str:
    """The YAML to apply. The namespace comes first."""
    crds = sorted((FOLDER / "files" / "crds").glob("*.yaml"))
    files = [*crds, RENDERED / "rights.yaml", RENDERED / _policy_file(observe_only)]
    return "\n---\n".join([_NAMESPACE, *(path.read_text() for path in files)])


def render_files(helm: Path) -> dict[Path, str]:
    """The expected content of each rendered file. Raises LabError with Helm's message."""
    found = {RENDERED / "rights.yaml": render(helm, only=RIGHTS)}
    for observe_only in (False, True):
        value = f"observeOnly={str(observe_only).lower()}"
        found[RENDERED / _policy_file(observe_only)] = render(helm, only=[NODES], values=[value])
    return {path: _HEAD + text for path, text in found.items()}


def _policy_file(observe_only: bool) -> str:
    return f"policy-nodes-{'observing' if observe_only else 'armed'}.yaml"


def render(
    helm: Path, *, only: Sequence[str] = (), values: Sequence[str] = (), files: Sequence[Path] = ()
) -> str:
    """Run `helm template`. `only` names templates; `values` are for --set, `files` for --values."""
    command = [
        str(helm), "template", RELEASE, str(FOLDER), f"--namespace={NAMESPACE}",
        f"--kube-version={KUBERNETES}",
        *(f"--show-only=templates/{name}" for name in only),
        *(f"--set={value}" for value in values),
        *(f"--values={path}" for path in files),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise LabError(f"`helm template` of {FOLDER} failed:\n{done.stderr.strip()}")
    return done.stdout


def list_outdated(wanted: dict[Path, str]) -> list[Path]:
    return [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]


def main(arguments: Sequence[str]) -> int:
    wanted = render_files(build.ensure_helm())
    outdated = list_outdated(wanted)
    if "--check" in arguments:
        for path in outdated:
            print(f"out of date: {path}; run `python -m everstep_lab.chart`", file=sys.stderr)
        return 1 if outdated else 0
    for path in outdated:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
