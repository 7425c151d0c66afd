"""Recordings from the lab, in which two GPUs break under a job of two pods."""

import copy
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "recorded"
NOW = 1795299029.0
"""The time of the recording: 2026-11-21 22:10:29 UTC."""


def job(**status: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "job.json").read_text())
    found["status"] |= status
    return found


def nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "nodes.json").read_text())["items"]
    return found


def quarantines() -> list[dict[str, Any]]:
    return [n for n in nodes() if n["kind"] == "NodeQuarantine"]


def deleted(raw: dict[str, Any]) -> dict[str, Any]:
    """The job as it is while it is deleted in the foreground: its status stays as it was."""
    gone = {**raw["metadata"], "deletionTimestamp": "2026-11-21T22:10:20Z"}
    return {**raw, "metadata": gone}


def with_condition(
    raw: dict[str, Any], kind: str, status: str, reason: str = "R"
) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    for condition in changed["status"]["conditions"]:
        if condition["type"] == kind:
            condition |= {"status": status, "reason": reason, "message": f"{reason} it is"}
    return changed
