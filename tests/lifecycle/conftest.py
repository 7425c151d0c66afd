"""One lab for this folder, with stubs as workers. Every test leaves the lab as it found it.

EVERSTEP_LIFECYCLE_LAB=running uses a lab that `everstep-lab up` has started with the same
EVERSTEP_LAB_NETWORK, images and flags, so that you need not wait for its start while you write a test.
"""

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from lifecycle.scene import Scene
from own_lab import own_lab
from stub_image.given import IMAGES

NETWORK = 72


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    if os.environ.get("EVERSTEP_LIFECYCLE_LAB") == "running":
        yield Lab.running()
        return
    config = LabConfig(
        nodes=4,
        gpus_per_node=1,
        images=IMAGES,
        operator_args=("--cordon-budget=1", "--figures-seconds=0.5"),
    )
    with own_lab(config, NETWORK) as lab:
        yield lab


@pytest.fixture
async def scene(lab: Lab) -> AsyncIterator[Scene]:
    async with lab.api() as api:
        found = Scene(lab, api)
        try:
            yield found
        finally:
            await found.clear()
