"""One lab for this folder, without an operator. Each test starts its own operator, behind the proxy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import replicas
from crash.plan import Clean
from everstep_lab import Lab
from everstep_lab.config import LabConfig
from own_lab import own_lab
from stub_image.given import IMAGES

NETWORK = 71
LANES = 3
NODES = 9


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    config = LabConfig(nodes=NODES, gpus_per_node=2, operator=False, images=IMAGES)
    with own_lab(config, NETWORK) as lab:
        yield lab


@pytest.fixture(scope="package")
def account(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubeconfig of the operator's ServiceAccount. Installs the chart's CRDs, permissions and
    policies.
    """
    return replicas.install(lab, tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="package")
def cleans() -> dict[str, Clean]:
    """The undisturbed plays of each scenario. All tests that compare with them share one run."""
    return {}
