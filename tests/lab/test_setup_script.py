"""`make setup` does nothing the second time, and installs a Go that has disappeared since."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (".ci/setup", "constraints.txt", "constraints-go.txt", "pyproject.toml")


def test_setup_installs_go_if_that_of_the_path_is_gone(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write_command(tmp_path / ".venv/bin/python", "exit 0")
    write_command(tmp_path / ".venv/bin/uv", f'echo "$@" >>{tmp_path}/installed')
    assert "constraints-go.txt" not in set_up(tmp_path, "go1.26.0"), "the PATH has one"
    assert set_up(tmp_path, "go1.26.0") == ""
    assert "constraints-go.txt" in set_up(tmp_path, "go1.19")


def set_up(folder: Path, go: str) -> str:
    """Run the script beside this version of Go. Returns what it has installed."""
    write_command(folder / "path/go", f"echo {go}")
    installed = folder / "installed"
    installed.write_text("")
    path = f"{folder}/path:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ".ci/setup"], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return installed.read_text()


def write_command(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
