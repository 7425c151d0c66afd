"""Stores and jobs that reach the S3 server through a proxy."""

import secrets
from pathlib import Path

import pytest

from agent.gang import Gang
from everstep_agent import agent
from everstep_agent.storage import open_store, opening
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import env
from everstep_lab import objectstore
from store.proxy import S3Proxy

QUICK = Patience(deadline_s=5.0, first_s=0.01, longest_s=0.1)
SHORT = Patience(deadline_s=2.0, first_s=0.01, longest_s=0.1)


def environment(s3: objectstore.ObjectStore, proxy: S3Proxy) -> dict[str, str]:
    return s3.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}


def a_store(
    s3: objectstore.ObjectStore, proxy: S3Proxy, patience: Patience = QUICK, run: str = ""
) -> Retrying:
    run = run or f"tests/{secrets.token_hex(4)}"
    return open_store(f"s3://{s3.bucket}/p", run, environment(s3, proxy), patience=patience)


class S3Gang(Gang):
    """A job whose agents reach the store through the proxy. The test itself reads the store directly."""

    def __init__(
        self,
        tmp_path: Path,
        s3: objectstore.ObjectStore,
        proxy: S3Proxy,
        count: int = 2,
        **settings: object,
    ) -> None:
        uri = f"s3://{s3.bucket}/{secrets.token_hex(4)}"
        super().__init__(tmp_path, count, **{"uri": uri, **settings})  # type: ignore[arg-type]
        self.behind = s3.environment()
        self.stub |= environment(s3, proxy)

    def store(self) -> Retrying:
        return open_store(str(self.settings["uri"]), str(self.settings["run"]), self.behind)

    @property
    def run(self) -> str:
        return f"{str(self.settings['uri']).partition('://')[2]}/{self.settings['run']}"


def make_impatient(monkeypatch: pytest.MonkeyPatch, patience: Patience = SHORT) -> None:
    """Make the agents' calls to the store give up soon."""

    def open_impatient(*given: object) -> Retrying:
        return Retrying(opening.open_raw(*given), patience)  # type: ignore[arg-type]

    monkeypatch.setattr(agent, "open_store", open_impatient)


def settings_of(gang: Gang) -> env.AgentEnv:
    return next(iter(gang.agents.values())).settings
