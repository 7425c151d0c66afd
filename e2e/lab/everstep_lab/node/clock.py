"""Wall-clock times for Kubernetes objects. On a node, only the shim also reads the wall clock."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251


def stamp(moment: datetime) -> str:
    """The time as metav1.Time, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(moment: datetime) -> str:
    """The time as metav1.MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_stamp(text: str) -> datetime:
    return datetime.fromisoformat(text)
