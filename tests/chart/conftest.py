"""One lab with one node and without an operator, and one `helm`, for this folder."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from chart_given import As, apply, read_documents
from everstep_lab import Lab, build, chart, kubeconfig
from everstep_lab.api import Api, Object
from everstep_lab.config import LabConfig
from own_lab import own_lab

NETWORK = 88


@pytest.fixture(scope="session")
def helm() -> Path:
    return build.ensure_helm(lambda text: None)


@pytest.fixture(scope="session")
def defaults(helm: Path) -> list[Object]:
    """The objects that the chart installs with its default values."""
    return read_documents(chart.render(helm))


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    with own_lab(LabConfig(nodes=1, operator=False), NETWORK) as lab:
        yield lab


@pytest.fixture(scope="package")
def installed(lab: Lab) -> Lab:
    """The lab with the rights, policies and CRDs of an armed release."""
    apply(lab, chart.read_installed(observe_only=False))
    lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return lab


@pytest.fixture
async def admin(lab: Lab) -> AsyncIterator[Api]:
    async with lab.api() as api:
        yield api


@pytest.fixture
async def acting(installed: Lab, admin: Api) -> AsyncIterator[As]:
    """Return a function that creates a client with a fresh token of a namespace's ServiceAccount."""
    async with AsyncExitStack() as stack:

        async def act(namespace: str, account: str) -> Api:
            answer = await admin.create(
                f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token",
                {
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenRequest",
                    "spec": {"expirationSeconds": 600},
                },
            )
            url, _ = kubeconfig.read(installed.kubeconfig)
            ca = installed.places.certs / "ca.crt"
            return await stack.enter_async_context(Api(url, token=answer["status"]["token"], ca=ca))

        yield act
