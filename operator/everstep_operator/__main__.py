"""everstep-operator: read the settings, connect, run the command."""

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import socket
import sys

from everstep_operator import kube, logs, release_all
from everstep_operator.election import Alone, Elector, Leadership
from everstep_operator.kube import Kube
from everstep_operator.lease import Timing
from everstep_operator.replica import Replica
from everstep_operator.settings import Settings, SettingsError, load_settings
from everstep_operator.tokens import AccountTokens

RELEASE_LEASE_SECONDS = 30.0
"""How long the operator stays inactive after a release-all, while it is being deleted."""


def main() -> None:
    try:
        command, settings = load_settings()
    except SettingsError as error:
        sys.exit(f"everstep-operator: {error}")
    logs.start(settings.log_level)
    # The kernel drops a signal that a container's first process has no handler for. The handler for an orderly
    # end is installed later, when the watches run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise_open_files()
    try:
        sys.exit(asyncio.run(run(command, settings)))
    except (kube.NoCluster, release_all.NotReleased) as error:
        sys.exit(f"everstep-operator: {error}")


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: the operator has a connection to each agent of
    all jobs, and container runtimes start with 1024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the kernel allows less by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def run(command: str, settings: Settings) -> int:
    """Connect, run the command and return the exit status.

    There are three ports: the operator's own, one that writes nodes, and one for the Lease. Only
    the Lease's port has no gate.
    """
    port = await Kube.connect(qps=settings.qps, burst=settings.burst)
    lease_port = await Kube.connect(identity="lease")
    account = settings.nodes_account
    nodes = port.build_other("nodes", AccountTokens(port, account)) if account else port
    try:
        if command == "release-all":
            seconds = max(RELEASE_LEASE_SECONDS, settings.lease_seconds)
            leadership = _build_leadership(settings, lease_port, seconds)
            return await release_all.run(port, nodes, leadership)
        leadership = _build_leadership(settings, lease_port, settings.lease_seconds)
        return await Replica(settings, port, nodes, leadership).run()
    finally:
        for each in {port, nodes, lease_port}:
            await each.close()


def build_identity(given: str) -> str:
    """Build an identity that is unique for each start, so that a restarted container does not
    mistake its predecessor's lease for its own.
    """
    host = given or os.environ.get("HOSTNAME") or socket.gethostname()
    return f"{host}_{secrets.token_hex(4)}"


def _build_leadership(settings: Settings, port: Kube, seconds: float) -> Leadership:
    if settings.lease_place is None:
        return Alone()
    timing = Timing(lease=seconds, renew=settings.renew_seconds, retry=settings.retry_seconds)
    return Elector(port, settings.lease_place, build_identity(settings.identity), timing)


if __name__ == "__main__":
    main()
