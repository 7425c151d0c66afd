"""A test that is named by its id runs, and a run says which tests it left out."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = "tests/input/test_the_model_and_the_api_server.py"
LONG = f"{FILE}::test_they_agree_on_thousands_of_specs"


def collect(name: str) -> list[str]:
    """Return what pytest would run, and what it says about the rest."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


def test_a_long_test_runs_if_its_id_is_given() -> None:
    assert [line for line in collect(LONG) if "::" in line] == [LONG]


def test_long_tests_of_a_named_file_stay_out_and_are_counted() -> None:
    shown = collect(FILE)
    assert LONG not in shown
    assert "1 long tests were left out: name one by its id, or give `-m long`." in shown
