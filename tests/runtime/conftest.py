"""Torch is imported once, with one thread; workers are forked from this process."""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent import gang
from everstep import defer_dynamo, forming
from everstep_agent.pod import spawn
from everstep_agent.pod.zygote_spawner import WARM_FOR_UNITS
from runtime.a_job import Trial
from runtime.sharded_ranks import Launcher

torch.set_num_threads(1)
# The first call after a fork creates torch's thread pool again. Two threads that do so at once would abort.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
defer_dynamo.defer_compiler()


WARM = "warm_for_units"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of units last, because no other test may run with torch's compiler loaded."""
    items.sort(key=lambda item: WARM in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def warm_for_units() -> None:
    """Import what ranks with units need, as their zygote does, so that forked ranks import nothing more."""
    for name in WARM_FOR_UNITS:
        importlib.import_module(name)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path).track()


@pytest.fixture
def a_trial(tmp_path: Path) -> Callable[..., Trial]:
    def make(**start: Any) -> Trial:
        return Trial(tmp_path, **start)

    return make


@pytest.fixture(autouse=True)
def _workers_of_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang's workers come from `SubprocessSpawner`, which a test may replace."""
    monkeypatch.setattr(gang, "fork_script", lambda script: spawn.SubprocessSpawner(script))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[forming.REINIT, forming.RECONFIGURE])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each way to form a group. The workers read it from their environment."""
    if request.param == forming.RECONFIGURE and not forming.can_reconfigure():
        pytest.skip("this torch cannot reconfigure a group")
    monkeypatch.setenv(forming.SETTING, request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.end()
