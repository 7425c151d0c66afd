"""A lab without an operator: its API server alone accepts or refuses objects."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_lab import Lab, kubeconfig
from everstep_lab.config import LabConfig
from input.api_server import ApiServer
from own_lab import own_lab

NETWORK = 73
CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    with own_lab(LabConfig(nodes=1, operator=False), NETWORK) as lab:
        lab.kubectl("apply", "--server-side", "-f", str(CRDS))
        lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield lab


@pytest.fixture
def api_server(lab: Lab) -> Iterator[ApiServer]:
    url, token = kubeconfig.read(lab.kubeconfig)
    server = ApiServer(url, token=token, ca=lab.places.certs / "ca.crt")
    yield server
    server.close()
