"""Every command in the plugin's README, exactly as written, in a sensible order."""

import asyncio
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from everstep_demo.board import Board
from everstep_demo.runwatch import RunWatch
from everstep_kubectl import cluster
from everstep_lab import Lab
from integration.trial import NAMESPACE, URI, Trial, build_job

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
NAME = "byte-lm"
README = Path(cluster.__file__).with_name("README.md").read_text()
STEP = 400


def commands(*starts: str) -> list[str]:
    """Return the README's kubectl commands that start with one of `starts`."""
    lines = [line.strip() for line in re.findall(r"^    (kubectl .*)$", README, re.M)]
    return [line for line in lines if line.startswith(starts)]


class Shell:
    """A user's shell, with the lab's kubectl and the plugin in PATH."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._folder = folder
        bin_ = folder / "bin"
        bin_.mkdir()
        (bin_ / "kubectl").symlink_to(lab.described["kubectl"])
        path = f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "KUBECONFIG": str(lab.kubeconfig)}
        self.ran: set[str] = set()

    async def __call__(self, line: str, *, status: int = 0) -> str:
        self.ran.add(line)
        process = await asyncio.create_subprocess_shell(
            line, cwd=self._folder, env=self._environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode == status, f"$ {line}\n{out.decode()}"
        return out.decode()


@pytest.fixture(scope="module")
def shell(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(lab, tmp_path_factory.mktemp("user"))


@pytest.fixture
async def trial(lab: Lab, board: Board) -> Trial:
    if not await board.exists(NAME):
        spec = {"checkpoint": {"uri": URI, "everySteps": 50, "keep": 1000}}
        environment = {"TINY_SECONDS": "0.02", "WANDB_API_KEY": "hunter2hunter2"}
        await board.create(build_job(NAME, env=environment, spec=spec))
    watch = RunWatch(URI, f"{NAMESPACE}/{NAME}", lab.store_environment)
    return Trial(NAME, board, watch)


async def test_looking_costs_nothing_and_tells_what_is(shell: Shell, trial: Trial) -> None:
    await trial.until_stepping()
    looking = commands(
        "kubectl everstep status", "kubectl everstep nodes", "kubectl everstep --help"
    )
    shown = dict(zip(looking, await asyncio.gather(*map(shell, looking)), strict=True))
    assert "2/2" in shown["kubectl everstep status"]
    assert "  saved  " in shown[f"kubectl everstep status {NAME}"]
    assert "InUse" in shown["kubectl everstep nodes"]


async def test_a_drill_needs_consent_and_ends_with_a_timeline(shell: Shell, trial: Trial) -> None:
    await trial.until_stepping()
    (drill,) = commands("kubectl everstep drill")
    assert "has not opted in" in await shell(drill, status=2)
    await shell(*commands("kubectl annotate"))
    await trial.until("the first checkpoint in status", lambda: has_checkpoint(trial))
    assert "drill passed: no step was lost" in await shell(drill)
    looking = commands("kubectl everstep timeline")
    table, document, picture = await asyncio.gather(*map(shell, looking))
    assert "GPU-seconds; 0 steps lost" in table
    assert yaml.safe_load(document)[0]["cause"] == "PodDeleted"
    assert picture.strip() == f"{NAME}-timeline.png"


async def has_checkpoint(trial: Trial) -> bool:
    return "checkpoint" in (await trial.job()).get("status", {})


async def test_a_node_is_explained_and_released(lab: Lab, shell: Shell, board: Board) -> None:
    lab.fault("node-2", gpu=0, xid=64)

    async def marked() -> bool:
        return (await board.nodes())["node-2"].cordoned

    async with asyncio.timeout(40):
        while not await marked():
            await asyncio.sleep(0.2)
    why, release = commands("kubectl everstep why", "kubectl everstep release")
    assert "xid 64" in await shell(why)
    assert "node-2 is released" in await shell(release)
    lab.heal("node-2")
    assert not await marked()
    assert "InUse" in await shell(why)
    assert "nothing to release" in await shell(release, status=2)


async def test_an_older_checkpoint_becomes_another_job(
    lab: Lab, shell: Shell, trial: Trial, board: Board
) -> None:
    async def far() -> bool:
        await trial.watch.refresh()
        return trial.watch.committed >= STEP

    await trial.until(f"a checkpoint of step {STEP}", far)
    (pin,) = commands("kubectl everstep checkpoint byte-lm --pin")
    assert "is pinned as before-lunch (manifests/" in await shell(pin)
    suspend, resume = commands("kubectl everstep suspend", "kubectl everstep resume")
    assert f"{NAME}: Suspended at step" in await shell(suspend)
    reading = commands("kubectl everstep checkpoints ls", "kubectl everstep checkpoints verify")
    listed, verified = await asyncio.gather(*map(shell, reading))
    assert re.search(r" before-lunch( |$)", listed, re.M)
    (unpin,) = commands("kubectl everstep checkpoints unpin")
    assert "before-lunch (step" in await shell(unpin)
    assert "has been unpinned" in await shell(pin, status=1)
    assert re.search(rf"^{STEP} ", listed, re.M)
    assert "whole: steps 1 to" in verified
    (restore,) = commands("kubectl everstep checkpoints restore")
    assert f"copied the checkpoint of step {STEP}" in await shell(restore)
    (apply,) = commands("kubectl apply -f byte-lm-2.yaml")
    _, resumed = await asyncio.gather(shell(apply), shell(resume))
    assert f"{NAME}: Running" in resumed
    new = Trial(
        "byte-lm-2", board, RunWatch(URI, f"{NAMESPACE}/{NAME}-from-{STEP}", lab.store_environment)
    )
    await new.until_stepping()
    assert [e.step for e in await new.watch.ledger()][:STEP] == list(range(1, STEP + 1))
    assert await new.step() >= STEP
    await board.delete("byte-lm-2")


async def test_a_report_holds_no_secret(shell: Shell, trial: Trial, tmp_path: Path) -> None:
    (report,) = commands("kubectl everstep report")
    said = await shell(f"{report} --file {tmp_path}/r.tar.gz")
    assert "were removed" in said
    with tarfile.open(tmp_path / "r.tar.gz") as archive:
        files = {m.name.split("/", 1)[1]: archive.extractfile(m) for m in archive.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file}
    assert "hunter2" not in "".join(texts.values())
    assert "everstep event=" in "".join(t for n, t in texts.items() if n.startswith("logs/"))
    assert {"jobs.json", "nodes.json", f"{NAME}.timeline.txt", "problems.txt"} <= set(texts)
    shell.ran.add(report)


async def test_no_command_of_the_readme_was_left_out(shell: Shell, board: Board) -> None:
    assert set(commands("kubectl ")) == shell.ran & set(commands("kubectl "))
    await board.delete(NAME)
