"""One lab for those tests in this folder that do not break it."""

from collections.abc import Iterator

import pytest

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from own_lab import own_lab

NETWORK = 90


@pytest.fixture(scope="package")
def shared() -> Iterator[Lab]:
    with own_lab(LabConfig(nodes=2, gpus_per_node=2, operator=False), NETWORK) as lab:
        yield lab


@pytest.fixture
def on_shared_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use the shared lab."""
    monkeypatch.setenv("EVERSTEP_LAB_NETWORK", str(NETWORK))
