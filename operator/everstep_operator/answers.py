"""The API server's errors, classified by what the caller can do about them. Pure."""

import json
import re

RETRY_AFTER_MAX = 60.0


class KubeError(Exception):
    """The request failed; `message` is the API server's own text."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after = 0.0
        """Seconds that the server asked us to wait."""


class Gone(KubeError):
    """The object, or its kind, does not exist."""


class Conflict(KubeError):
    """The object changed since it was read, or has another UID: observe again."""


class AlreadyExists(KubeError):
    """The name is taken. If the owner's UID matches, the operator itself created the object."""


class Denied(KubeError):
    """Not allowed: RBAC, a quota, an admission policy."""


class Invalid(KubeError):
    """The object is invalid; a retry would fail, too."""


class Transient(KubeError):
    """Overloaded, unreachable, timed out: the request may or may not have been applied."""


class Standby(KubeError):
    """The request was not sent: this process does not hold the lease (any more)."""


def classify_error(status: int, raw: bytes) -> KubeError:
    """The error for a Status document of the API server."""
    try:
        document = json.loads(raw)
        reason, message = str(document.get("reason", "")), str(document.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", raw[:500].decode(errors="replace")
    return _class_of(status, reason)(status, reason, message or f"HTTP {status}")


def _class_of(status: int, reason: str) -> type[KubeError]:
    if status == 409:
        return AlreadyExists if reason == "AlreadyExists" else Conflict
    by_status = {
        401: Denied,
        403: Denied,
        404: Gone,
        405: Invalid,
        410: Gone,
        400: Invalid,
        413: Invalid,
        422: Invalid,
    }
    return by_status.get(status, Transient)


def has_failed_webhook(error: KubeError) -> bool:
    """Whether an admission webhook did not answer, which the API server reports as its own error."""
    return error.status == 500 and "failed calling webhook" in error.message


_BY_POLICY = re.compile(
    r"admission webhook .* denied the request|ValidatingAdmissionPolicy .* denied request"
)


def is_denied_by_policy(error: KubeError) -> bool:
    """Whether an admission webhook or a ValidatingAdmissionPolicy refused the object. Each chooses its
    status; the default is 400 or 422, as for an invalid object.
    """
    return _BY_POLICY.search(error.message) is not None


def parse_retry_after(text: str) -> float:
    """Parse a Retry-After header to seconds, at most RETRY_AFTER_MAX.

    The API server never sends a date; a date counts as 0.
    """
    return min(float(text), RETRY_AFTER_MAX) if text.isascii() and text.isdigit() else 0.0
