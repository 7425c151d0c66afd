"""One lab with one node for this folder, without an operator of its own, and one `helm`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from chart_given import apply, read_documents
from everstep_lab import Lab, build, chart
from everstep_lab.api import Api, Object
from everstep_lab.config import LabConfig
from own_lab import own_lab

NETWORK = 88


@pytest.fixture(scope="session")
def helm() -> Path:
    return build.ensure_helm(lambda text: None)


@pytest.fixture(scope="session")
def defaults(helm: Path) -> list[Object]:
    """What is installed with the values as they are shipped."""
    return read_documents(chart.render(helm))


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    with own_lab(LabConfig(nodes=1, operator=False), NETWORK) as lab:
        yield lab


@pytest.fixture(scope="package")
def installed(lab: Lab, helm: Path) -> Lab:
    """Rights, policies and CRDs are there, as of an armed release."""
    apply(lab, asyncio.run(chart.render_installed(helm, observe_only=False)))
    lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return lab


@pytest.fixture
async def admin(lab: Lab) -> AsyncIterator[Api]:
    async with lab.api() as api:
        yield api
