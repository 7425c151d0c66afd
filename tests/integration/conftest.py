"""One lab for this folder. The tests of a file share a job where possible."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from everstep_demo.board import Board
from everstep_demo.keeping import keep_logs
from everstep_lab import Lab
from everstep_lab.config import LabConfig
from own_lab import own_lab

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "build" / "integration"


@pytest.fixture(scope="package")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    config = LabConfig(
        nodes=5,
        gpus_per_node=2,
        images=str(HERE / "images.yaml"),
        operator_args=("--cordon-budget=2", "--figures-seconds=0.5"),
    )
    failed = request.session.testsfailed

    def keep(lab: Lab) -> None:
        if request.session.testsfailed > failed:
            print(f"\nthe lab's logs are kept in {keep_logs(lab, KEPT)}")

    with own_lab(config, None, keep) as lab:
        yield lab


@pytest.fixture
async def board(lab: Lab) -> AsyncIterator[Board]:
    async with lab.api() as api:
        yield Board(api)
