"""Runs several awaitables concurrently: the first error cancels the rest and is raised unchanged."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from everstep_agent.storage.errors import Unreachable

T = TypeVar("T")


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def move_all(moves: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Run functions that move chunks, at most `at_once` of them at the same time. A slow connection may
    move none of several chunks in time, so those that are left are then moved one after the other.
    """
    found: dict[int, T] = {}

    async def move(index: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            found[index] = await moves[index]()

    async def move_rest(at_once: int) -> None:
        slots = asyncio.Semaphore(at_once)
        await all_of(move(index, slots) for index in range(len(moves)) if index not in found)

    try:
        await move_rest(at_once)
    except Unreachable:
        await move_rest(1)
    return [found[index] for index in range(len(moves))]
