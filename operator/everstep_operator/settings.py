"""The administrator's settings: flags, with the environment as fall-back. Read once, at start."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep_operator.world import Scope

PREFIX = "EVERSTEP_OPERATOR_"
NAME = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
COMMANDS = ("run", "release-all")


class SettingsError(ValueError):
    """A setting is missing or invalid."""


class Settings(BaseModel):
    """Field `http_port` is the flag --http-port and the variable EVERSTEP_OPERATOR_HTTP_PORT."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(
        default="",
        description="key from which the jobs' tokens are derived (better in a file: --key-file)",
    )
    key_file: str = Field(default="", description="file that holds the key")
    http_host: str = Field(
        default="",
        description="address of /healthz, /readyz and /metrics; empty: all, IPv4 and IPv6",
    )
    http_port: int = Field(
        default=8080,
        ge=0,
        le=65535,
        description="port of /healthz, /readyz and /metrics; 0 takes a free one",
    )
    agent_seconds: float = Field(
        default=1.0, gt=0, description="seconds between two questions to a job's agents"
    )
    figures_seconds: float = Field(
        default=10.0,
        ge=0,
        description="minimum seconds between two writes of a job's figures; together they take "
        "at most half of --qps",
    )
    resync_seconds: float = Field(
        default=300.0, gt=0, description="seconds between two full lists of the watched objects"
    )
    qps: float = Field(default=50.0, gt=0, description="sustained writes per second")
    burst: int = Field(
        default=100, ge=1, description="burst of writes; half of it is reserved for recoveries"
    )
    scrape_seconds: float = Field(
        default=15.0, gt=0, le=300, description="seconds between two scrapes of an exporter"
    )
    scrape_timeout_seconds: float = Field(default=5.0, gt=0, description="time limit of one scrape")
    exporter_selectors: str = Field(
        default="app.kubernetes.io/name=dcgm-exporter;app=nvidia-dcgm-exporter",
        pattern=r"^[^;]+(;[^;]+)*$",
        description="label selectors of the dcgm-exporter pods, separated by semicolons; a pod must match one of them",
    )
    exporter_namespaces: str = Field(
        default="gpu-operator,nvidia-gpu-operator,gke-managed-system,kube-system",
        pattern=rf"^{NAME}(,{NAME})*$",
        description="namespaces whose exporters are accepted, separated by commas: only those "
        "in which only administrators can create DaemonSets",
    )
    exporter_port: int = Field(
        default=9400,
        ge=1,
        le=65535,
        description="port of the exporters, if the pod does not name one",
    )
    cordon_budget: str = Field(
        default="10%",
        pattern=r"^(\d{1,3}%|\d{1,6})$",
        description="GPU nodes that Everstep may cordon at once: a share such as 10% or a number, at least 1",
    )
    lease: str = Field(
        default="",
        pattern=rf"^({NAME}/{NAME})?$",
        description="NAMESPACE/NAME of the Lease whose holder acts; empty: no election, so run one replica only",
    )
    identity: str = Field(
        default="",
        max_length=128,
        description="this replica's name in the Lease; empty: the host's name",
    )
    lease_seconds: float = Field(
        default=15.0,
        ge=1,
        le=3600,
        description="seconds that other replicas wait for a renewal of the Lease",
    )
    renew_seconds: float = Field(
        default=10.0, gt=0, description="seconds after its last renewal at which the holder stops"
    )
    retry_seconds: float = Field(
        default=2.0, gt=0, description="seconds between two looks at the Lease"
    )
    observe_only: bool = Field(
        default=False,
        description="observe-only mode: judge nodes, move jobs off bad ones, change no node",
    )
    watch_namespaces: str = Field(
        default="",
        pattern=rf"^({NAME}(,{NAME})*)?$",
        description="namespaces whose jobs are managed, separated by commas; empty: all",
    )
    health: bool = Field(
        default=True,
        description="judge nodes and GPUs; false: nodes are neither read nor written, and jobs leave none",
    )
    nodes_service_account: str = Field(
        default="",
        pattern=rf"^({NAME}/{NAME})?$",
        description="NAMESPACE/NAME of the ServiceAccount that writes nodes, with its own tokens; "
        "empty: this process's identity",
    )
    log_level: str = Field(
        default="INFO",
        pattern="^(DEBUG|INFO|WARNING|ERROR)$",
        description="DEBUG, INFO, WARNING or ERROR",
    )

    @property
    def key_bytes(self) -> bytes:
        return self.key.encode()

    @property
    def exporter_selector_list(self) -> tuple[str, ...]:
        return tuple(self.exporter_selectors.split(";"))

    @property
    def exporter_namespace_list(self) -> tuple[str, ...]:
        return tuple(self.exporter_namespaces.split(","))

    @property
    def scope(self) -> Scope:
        namespaces = tuple(filter(None, self.watch_namespaces.split(",")))
        return Scope(namespaces=namespaces, nodes=self.health)

    @property
    def lease_place(self) -> tuple[str, str] | None:
        return to_place(self.lease)

    @property
    def nodes_account(self) -> tuple[str, str] | None:
        return to_place(self.nodes_service_account)


def to_place(text: str) -> tuple[str, str] | None:
    """Namespace and name of `namespace/name`; None for the empty text."""
    namespace, _, name = text.partition("/")
    return (namespace, name) if name else None


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, Settings]:
    """The command and the settings.

    Raises `SettingsError`, which names the flag, the variable, the value and what is expected.
    """
    environ = os.environ if environ is None else environ
    given = {k: v for k, v in vars(_build_parser().parse_args(argv)).items() if v is not None}
    command = given.pop("command")
    values = {
        n: environ[PREFIX + n.upper()]
        for n in Settings.model_fields
        if PREFIX + n.upper() in environ
    }
    try:
        settings = Settings(**{**values, **given})
    except ValidationError as error:
        first = error.errors()[0]
        name, why = str(first["loc"][0]), first["msg"]
        if first["type"] == "string_pattern_mismatch":  # a pattern says nothing to an administrator
            why = f"expected {Settings.model_fields[name].description}"
        raise SettingsError(f"{_both_names(name)} is {first['input']!r}: {why}") from None
    _check_lease(settings)
    return command, settings if command == "release-all" else _with_key(settings)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-operator", description="The Everstep operator.")
    parser.add_argument(
        "command",
        nargs="?",
        choices=COMMANDS,
        default="run",
        help="run: the operator (default). release-all: undo every change that Everstep "
        "made to nodes, delete all NodeQuarantines, and end; before an uninstall",
    )
    for name, field in Settings.model_fields.items():
        text = f"{field.description} (default {field.default!r}; {PREFIX}{name.upper()})"
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, help=text.replace("%", "%%"), **switch
        )
    return parser


def _both_names(name: str) -> str:
    return f"--{name.replace('_', '-')} ({PREFIX}{name.upper()})"


def _check_lease(settings: Settings) -> None:
    if not settings.lease_seconds > settings.renew_seconds > settings.retry_seconds:
        raise SettingsError(
            f"--lease-seconds {settings.lease_seconds:g}, --renew-seconds {settings.renew_seconds:g}, "
            f"--retry-seconds {settings.retry_seconds:g}: each must be greater than the next, or two "
            "replicas could act at once"
        )


def _with_key(settings: Settings) -> Settings:
    key = settings.key
    if settings.key_file:
        try:
            key = Path(settings.key_file).read_text().strip()
        except OSError as error:
            raise SettingsError(
                f"{_both_names('key_file')} {settings.key_file!r}: {error.strerror}"
            ) from None
        except UnicodeDecodeError:
            raise SettingsError(
                f"{_both_names('key_file')} {settings.key_file!r}: the key is not text; write it as text, such as "
                "the output of `openssl rand -hex 32`"
            ) from None
    if len(key) < 16:
        raise SettingsError(
            f"no key of at least 16 characters: give {PREFIX}KEY or --key-file ({PREFIX}KEY_FILE); "
            "it must stay the same across restarts, because the tokens of running jobs "
            "are derived from it"
        )
    return settings.model_copy(update={"key": key})
