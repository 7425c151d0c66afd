"""A lab whose operator reaches the API server only through the proxy."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import replicas
from crash.lane import Lane
from crash.nursery import Operator
from crash.proxy import Proxy
from everstep_lab import Lab, kubeconfig

NODES_OF_A_LANE = 3
"""Two for the job, and one more for a pod that must leave its node."""
ELECTION = (
    "--lease-seconds=3", "--renew-seconds=2.4", "--retry-seconds=0.4", f"--lease={replicas.LEASE}",
)  # fmt: skip
"""Shorter than the chart's 15, 10 and 2 s, because each takeover delays a case and those beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    lab: Lab
    proxy: Proxy
    operator: Operator
    lanes: Sequence[Lane]


@asynccontextmanager
async def a_rig(
    lab: Lab, folder: Path, account: Path, *flags: str, standby: bool = False
) -> AsyncIterator[Rig]:
    """Start the operator and prepare the lanes. `account` is the kubeconfig of the operator's
    ServiceAccount.

    `standby`: two replicas with a lease between them, as the chart installs them; otherwise one
    replica without a lease.
    """
    upstream, token = kubeconfig.read(account)
    authority = lab.places.certs / "ca.crt"
    replicas_wanted = 2 if standby else 1
    configs = [folder / f"replica-{i}.kubeconfig" for i in range(replicas_wanted)]
    lanes = max(1, len(lab.nodes) // NODES_OF_A_LANE)
    given = (
        *replicas.FLAGS, replicas.ACCOUNT, f"--http-host={lab.places.operator_ip}",
        "--figures-seconds=3600", f"--cordon-budget={lanes}", *(ELECTION if standby else ()), *flags,
    )  # fmt: skip
    host = lab.places.operator_ip
    async with Proxy(upstream, authority, host, replicas_wanted) as proxy, lab.api() as api:
        for config, url in zip(configs, proxy.urls, strict=True):
            document = kubeconfig.build(url, authority.read_bytes(), token, "everstep-operator")
            kubeconfig.write_private(config, document)
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "EVERSTEP_OPERATOR_KEY": "k" * 32,
        }
        async with Operator(given, environ, configs, folder / "operator.log") as operator:
            await operator.start()
            made = [Lane(lab, api, i, nodes) for i, nodes in enumerate(_split(lab.nodes))]
            for lane in made:
                await lane.label()
                await lane.until_noted()
            yield Rig(lab=lab, proxy=proxy, operator=operator, lanes=made)


def _split(nodes: Sequence[str]) -> list[Sequence[str]]:
    n = NODES_OF_A_LANE
    return [nodes[i : i + n] for i in range(0, len(nodes) - n + 1, n)]
