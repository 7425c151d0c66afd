"""An image with its own torch needs only `pip install everstep[runtime]`."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everstep_lab.kind.images import PACKAGES, REPOSITORY

UV = Path(sys.executable).parent / "uv"


def uv(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [UV, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built as in the Dockerfile's target `wheel`, from its files only."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in PACKAGES:
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    uv("build", "--offline", "--wheel", "--no-build-isolation", "--python", sys.executable,
       "--out-dir", str(source / "wheels"), ".", cwd=source)  # fmt: skip
    (built,) = (source / "wheels").glob("*.whl")
    return built


def test_the_wheel_brings_agent_contract_runtime_and_operator_and_not_the_lab(wheel: Path) -> None:
    packages = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"everstep", "everstep_agent", "everstep_contract", "everstep_operator"} <= packages
    assert "everstep_lab" not in packages


def test_beside_a_torch_that_is_there_it_installs_nothing_but_everstep(wheel: Path) -> None:
    said = uv("pip", "install", "--python", sys.executable, "--offline", "--dry-run",
              f"everstep[runtime] @ {wheel.as_uri()}", cwd=wheel.parent)  # fmt: skip
    changed = [line for line in said.splitlines() if line.lstrip().startswith(("+ ", "- ", "~ "))]
    assert changed
    assert {line.split()[1].partition("==")[0] for line in changed} == {"everstep"}, said
