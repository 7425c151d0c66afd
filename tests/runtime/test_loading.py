"""`everstep.load`: a checkpoint of a run, from its address alone."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from agent.a_run import ARun, entry
from everstep import loading
from everstep.errors import Misuse, StateError
from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.commit import Committed
from everstep_agent.storage import open_store
from everstep_contract import wire
from everstep_contract.fetched import Fetched
from everstep_contract.units import Mesh
from runtime.sharded_ranks import Launcher, Net, Rank

STEPS = (2, 4)
Full = dict[str, torch.Tensor]


def save(rank: Rank) -> tuple[list[Full], list[wire.Staged]]:
    states = []
    for step in STEPS:
        states.append(rank.train(2).gather())
        rank.session.saves.stage(step)
    return states, rank.staged()


async def commit(uri: str, folder: Path, saves: list[list[wire.Staged]]) -> None:
    run = ARun(open_store(uri, "", {}), folder)
    token = (await run.claim(1)).token
    for staged in saves:
        step = staged[0].step
        uploader, entries = Uploader(run.store, token), [entry(s) for s in (step - 1, step)]
        parts = [await uploader.upload(one, rank, entries) for rank, one in enumerate(staged)]
        outcome = await run.committer.commit(parts, token=token, world=len(staged))
        assert isinstance(outcome, Committed), outcome


@pytest.fixture(scope="module")
def made(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Full]]:
    """A run of two shards in a folder, and the states after its two checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    ranks: list[Any] = launcher.run(folder / "ranks", Mesh(shard=2), 2, save)
    saves = [list(staged) for staged in zip(*(frames for _, frames in ranks), strict=True)]
    asyncio.run(commit(f"file://{folder}/run", folder, saves))
    return folder / "run", ranks[0][0]


@pytest.fixture
def run(made: tuple[Path, list[Full]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def damage(run: Path, step: int) -> None:
    for chunk in run.glob(f"chunks/*/{step:010d}/*"):
        raw = chunk.read_bytes()
        chunk.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def test_it_is_what_torch_loads(made: tuple[Path, list[Full]]) -> None:
    run, states = made
    found = everstep.load(f"file://{run}")
    assert (found.step, found.run, set(found)) == (4, f"file://{run}", {"model", "optimizer"})
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert torch.equal(model.first.weight, states[1]["model/first.weight"])
    for name, parameter in model.named_parameters():
        moment = states[1][f"optimizer/state/model.{name}/exp_avg"]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_older_step_and_one_object_may_be_asked_for(made: tuple[Path, list[Full]]) -> None:
    run, states = made
    found = everstep.load(str(run), step=2, only=["model"])
    assert (found.step, list(found)) == (2, ["model"])
    assert torch.equal(found["model"]["norm.weight"], states[0]["model/norm.weight"])


def test_a_damaged_checkpoint_is_passed_over_and_named(run: Path) -> None:
    damage(run, 4)
    with pytest.warns(UserWarning, match=r"step 4 is passed over: .* is corrupt"):
        assert everstep.load(str(run)).step == 2
    with pytest.raises(StateError, match="is corrupt"):
        everstep.load(str(run), step=4)
    damage(run, 2)
    with pytest.raises(StateError, match=r"no checkpoint can be read: step 4: .*; step 2: "):
        everstep.load(str(run))


def test_a_checkpoint_that_is_retired_while_it_is_read_is_fetched_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job commits step 4 and retires step 2, which has been fetched just before."""
    fetch, fetched = loading._fetch, list[int]()

    def fetch_old(uri: str, step: int | None, only: tuple[str, ...], folder: str) -> Fetched:
        found = fetch(uri, step if fetched else 2, only, folder)
        fetched.append(found.step)
        if len(fetched) == 1:
            for chunk in run.glob("chunks/*/0000000002/*"):
                chunk.unlink()
        return found

    monkeypatch.setattr(loading, "_fetch", fetch_old)
    assert everstep.load(str(run)).step == 4
    assert fetched == [2, 4]


def test_a_file_of_the_current_folder_replaces_no_module_of_python(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parent / "queue.py").write_text("raise SystemExit('the wrong queue')\n")
    monkeypatch.chdir(run.parent)
    assert everstep.load("run", only=["model"]).step == STEPS[-1]


def test_what_is_not_there_is_said(run: Path) -> None:
    with pytest.raises(StateError, match="there is no checkpoint of step 3; there are: 4, 2"):
        everstep.load(str(run), step=3)
    with pytest.raises(StateError, match="has no net; it has model, optimizer"):
        everstep.load(str(run), only=["net"])
    with pytest.raises(StateError, match="there is no folder"):
        everstep.load(str(run / "other"))
    with pytest.raises(StateError, match="there is no run; give the address STORE/NAME of a run"):
        everstep.load(str(run.parent))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"uri": 3}, "give the address of a run"),
        ({"step": -1}, "give a whole number"),
        ({"only": "model"}, r"write only=\['model'\]"),
        ({"only": [3]}, "give a list of names"),
        ({"only": None}, "give a list of names"),
    ],
)
def test_misuse_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        everstep.load(**{"uri": "runs/a", **arguments})
