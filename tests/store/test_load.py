"""`everstep.load` with a run in a bucket."""

import asyncio
from pathlib import Path

import pytest
import torch

import everstep
from agent import gang as gangs
from agent.gang import Gang
from everstep import StateError
from everstep_lab import objectstore
from runtime import a_paced_script
from store.given import S3Gang
from store.proxy import S3Proxy


async def train(gang: Gang) -> None:
    gang.stub["PACED_STEPS"] = "3"
    async with gang:
        await gang.reports()


async def test_a_checkpoint_in_a_bucket_is_loaded_by_its_address(
    tmp_path: Path,
    s3: objectstore.ObjectStore,
    proxy: S3Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gangs, "STUB", a_paced_script.__file__)
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    there, here = S3Gang(tmp_path / "there", s3, proxy), Gang(tmp_path / "here", 2)
    await train(there)
    await train(here)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    loaded = await asyncio.to_thread(everstep.load, f"s3://{there.run}")
    beside = await asyncio.to_thread(everstep.load, f"file://{tmp_path}/here/store/ns/job")
    assert loaded.step == beside.step == 3
    for name, weight in beside["model"].items():
        assert torch.equal(loaded["model"][name], weight)
    with pytest.raises(StateError, match="there is no run"):
        await asyncio.to_thread(everstep.load, f"s3://{s3.bucket}/nothing")
