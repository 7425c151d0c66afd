import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "e2e" / "demo" / "run.py"


def test_the_demo_refuses_arguments_instead_of_playing_for_minutes() -> None:
    command = [sys.executable, str(SCRIPT), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unrecognized arguments: --quick" in done.stderr
