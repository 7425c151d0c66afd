"""A body to send. It may consist of several parts, which are sent from where they lie in memory."""

from typing import TypeAlias

Part: TypeAlias = bytes | memoryview
Body: TypeAlias = Part | tuple[Part, ...]
"""A tuple is sent as one body. A memoryview must be one of single bytes."""


def list_parts(body: Body) -> tuple[Part, ...]:
    return body if isinstance(body, tuple) else (body,)


def count_bytes(body: Body) -> int:
    return sum(map(len, list_parts(body)))
