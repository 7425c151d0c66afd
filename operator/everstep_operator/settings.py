"""What the operator's administrator sets: flags, with the environment as fall-back. Read once, at
start.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "EVERSTEP_OPERATOR_"


class SettingsError(ValueError):
    """A setting is missing or cannot be used."""


class Settings(BaseModel):
    """Field `http_port` is the flag --http-port and the variable EVERSTEP_OPERATOR_HTTP_PORT."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(
        default="",
        description="key from which the jobs' tokens are derived (or a file: see key_file)",
    )
    key_file: str = Field(default="", description="file that holds the key")
    http_host: str = Field(
        default="0.0.0.0", description="address of /healthz, /readyz and /metrics"
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="port of the same; 0 takes a free one"
    )
    agent_seconds: float = Field(
        default=1.0, gt=0, description="seconds between two questions to a job's agents"
    )
    figures_seconds: float = Field(
        default=10.0, ge=0, description="least seconds between two writes of mere figures"
    )
    resync_seconds: float = Field(
        default=300.0, gt=0, description="seconds between two full lists of what we watch"
    )
    qps: float = Field(default=20.0, gt=0, description="writes a second, sustained")
    burst: int = Field(
        default=40, ge=1, description="writes at once; half of them are kept for recoveries"
    )
    scrape_seconds: float = Field(
        default=15.0, gt=0, description="seconds between two scrapes of an exporter"
    )
    scrape_timeout_seconds: float = Field(default=5.0, gt=0, description="time limit of one scrape")
    exporter_selector: str = Field(
        default="app.kubernetes.io/name=dcgm-exporter",
        description="labels of the dcgm-exporter pods",
    )
    exporter_port: int = Field(
        default=9400, ge=1, le=65535, description="their port, where the pod does not name one"
    )
    cordon_budget: str = Field(
        default="10%",
        pattern=r"^(\d{1,3}%|\d{1,6})$",
        description="GPU nodes under our cordon at once: share or number, at least 1",
    )
    log_level: str = Field(
        default="INFO",
        pattern="^(DEBUG|INFO|WARNING|ERROR)$",
        description="DEBUG, INFO, WARNING or ERROR",
    )

    @property
    def key_bytes(self) -> bytes:
        return self.key.encode()


def load_settings(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Raises `SettingsError`, which names the flag, the variable, the value and what is expected."""
    environ = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(prog="everstep-operator", description="The Everstep operator.")
    for name, field in Settings.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            help=f"{field.description} (default {field.default!r}; {PREFIX}{name.upper()})".replace(
                "%", "%%"
            ),
        )
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    values = {
        n: environ[PREFIX + n.upper()]
        for n in Settings.model_fields
        if PREFIX + n.upper() in environ
    }
    try:
        settings = Settings(**{**values, **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise SettingsError(
            f"--{name.replace('_', '-')} ({PREFIX}{name.upper()}) is {first['input']!r}: {first['msg']}"
        ) from None
    return _with_key(settings)


def _with_key(settings: Settings) -> Settings:
    key = settings.key
    if settings.key_file:
        try:
            key = Path(settings.key_file).read_text().strip()
        except OSError as error:
            raise SettingsError(
                f"--key-file ({PREFIX}KEY_FILE) {settings.key_file!r}: {error.strerror}"
            ) from None
    if len(key) < 16:
        raise SettingsError(
            f"no key of at least 16 characters: give {PREFIX}KEY or --key-file ({PREFIX}KEY_FILE); "
            "it must stay the same over restarts, for the tokens of running jobs are derived from it"
        )
    return settings.model_copy(update={"key": key})
