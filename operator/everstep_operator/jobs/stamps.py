"""Times in the API's formats."""

from datetime import UTC, datetime


def to_seconds(stamp: str | None) -> float | None:
    """RFC 3339 → seconds since the Unix epoch; None for what is absent or unreadable."""
    if not stamp:
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None


def to_stamp(seconds: float) -> str:
    """Whole seconds, as metav1.Time."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_fine_stamp(seconds: float) -> str:
    """Milliseconds, for times from which durations are computed."""
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
