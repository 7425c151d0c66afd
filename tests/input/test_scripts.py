"""If a script has a mistake, the terminal shows cause and fix once, and nothing is retried.

Each script in `scripts/` is correct except for the mistake that its name says.
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 280.0

MISTAKES: dict[str, tuple[str, int]] = {
    "does_not_import": (r"ScriptError: .*ModuleNotFoundError: No module named 'torchh'", 1),
    "is_no_python": (r"ScriptError: .*SyntaxError: expected ':'", 1),
    "raises_at_once": (r"ScriptError: rank 0 .*FileNotFoundError: no such file: /data/train\.bin", 1),
    "raises_on_one_sample": (r"^everstep: .*sample 17: expected 4 columns, found 3", 1),
    "never_runs": (r"ScriptError: .*it must call everstep\.run\(main\)", 1),
    "never_steps": (r"ScriptError: .*no loop over job\.steps\(…\) ran", 1),
    "breaks_out": (r"Misuse: .*SGD\.step\(\) .*after a break out of it, .*call step\.skip\(\) instead of break", 1),
    "tracks_nothing": (r"Misuse: .*nothing is tracked; call job\.track\(model=…", 1),
    "wrong_types": (r"Misuse: .*until='1e4': give a whole number, 1 or more", 1),
}  # fmt: skip

pytestmark = pytest.mark.timeout(600)


async def train(folder: Path, name: str, *arguments: str, run: str = "trial") -> tuple[int, str]:
    """Run `everstep run` as a user would; return its status and output."""
    everstep = Path(sys.executable).parent / "everstep"
    child = await asyncio.create_subprocess_exec(
        str(everstep), "run", "--store", str(folder / "store"), "--run", run, str(folder / name),
        *(("--", *arguments) if arguments else ()),
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []
    assert child.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            while line := await child.stdout.readline():
                lines.append(line.decode())
            status = await child.wait()
    except TimeoutError:
        child.terminate()
        rest, _ = await child.communicate()
        raise AssertionError(f"{name} has not ended:\n{''.join(lines)}{rest.decode()}") from None
    print("".join(lines))
    return status, "".join(lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for script in SCRIPTS.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    (tmp_path / "is_no_python.py").write_text("def main(job)\n    pass\n")
    return tmp_path


def last_line(shown: str) -> str:
    return shown.rstrip().rsplit("\n", 1)[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_ends_the_run_with_its_cause_and_the_fix(folder: Path, name: str) -> None:
    words, status = MISTAKES[name]
    found, shown = await train(folder, f"{name}.py")
    assert found == status
    assert re.search(words, shown, re.M), shown
    # After a first step, a sample may have been damaged in transit, so the step is tried three times.
    tries = 3 if name == "raises_on_one_sample" else 1
    assert len(re.findall(r"Traceback", shown)) <= tries
    lost = len(re.findall(r"s  lost: ", shown))
    assert lost <= tries if tries > 1 else not lost


async def test_a_model_of_another_shape_names_the_tensor_and_spoils_nothing(folder: Path) -> None:
    """A run starts with one shape, is tried with another, and continues with the first."""
    status, shown = await train(folder, "base.py", "4")
    assert status == 0, shown
    status, shown = await train(folder, "base.py", "8")
    assert status == 1
    complaint = next(line for line in shown.splitlines() if line.startswith("everstep: "))
    assert re.search(r"Misuse: .*model: the checkpoint does not fit: .*size mismatch", complaint)
    assert "torch.Size([1, 4])" in complaint
    assert "torch.Size([1, 8])" in complaint
    assert "Build it as it was" in complaint
    assert "after fixing it, run the same command again to resume from step 8" in shown
    status, shown = await train(folder, "base.py", "4")
    assert status == 0, shown
