"""Which news the coordinator's board wakes its readers for."""

import asyncio
from dataclasses import replace

from agent.given import a_claim, an_epoch
from everstep_agent.coordinator.publish import Board
from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.peers.messages import Levels
from everstep_contract import levels

CLAIM = a_claim(2)


def document(epoch: EpochLevel, claimed: int) -> Levels:
    return Levels(
        version=1,
        coordinator=levels.SlotAttempt(slot=0, attempt=0),
        address="host-0:7070",
        epoch=epoch,
        claimed=claimed,
    )


def unclaimed(stage: Stage) -> EpochLevel:
    return an_epoch(number=2, stage=stage, unclaimed=(CLAIM,))


async def is_woken(epoch: EpochLevel, *then: Levels) -> list[bool]:
    """Whether a reader that knows the board's levels is woken by each of the next documents."""
    board = Board(document(epoch, claimed=1), levels.Seen)
    woken = []
    for news in then:
        reader = asyncio.create_task(board.wait_newer(board.levels.version))
        await asyncio.sleep(0)
        assert board.publish(news)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        woken.append(reader.done())
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return woken


async def test_a_claim_alone_wakes_nobody_while_the_group_is_formed() -> None:
    forms = unclaimed(Stage.STARTING)
    claimed = replace(forms, unclaimed=())
    runs = replace(claimed, stage=Stage.RUNNING)
    assert await is_woken(forms, document(claimed, 2), document(runs, 2)) == [False, True]


async def test_a_claim_wakes_the_readers_once_the_group_is_formed_or_with_other_news() -> None:
    runs = unclaimed(Stage.RUNNING)
    assert await is_woken(runs, document(replace(runs, unclaimed=()), 2)) == [True]
    forms = unclaimed(Stage.STARTING)
    holds = replace(forms, unclaimed=(), stage=Stage.HOLD)
    assert await is_woken(forms, document(holds, 2)) == [True]
    news = replace(document(replace(forms, unclaimed=()), 2), wanted=levels.Wanted(revision=1))
    assert await is_woken(forms, news) == [True]


async def test_who_asks_after_the_claim_reads_of_it() -> None:
    forms = unclaimed(Stage.STARTING)
    board = Board(document(forms, claimed=1), levels.Seen)
    board.publish(document(replace(forms, unclaimed=()), 2))
    assert (await board.wait_newer(0)).claimed == 2


async def test_seen_is_built_once_for_several_changes_and_all_their_readers() -> None:
    built: list[levels.Seen] = []

    def build() -> levels.Seen:
        built.append(levels.Seen(generation=len(built)))
        return built[-1]

    board = Board(document(an_epoch(number=2), claimed=1), build)
    for number in (3, 4, 5):
        board.publish(document(an_epoch(number=number), claimed=1))
    assert not built, "nobody has read yet"
    first, second = await board.wait_newer(0), await board.wait_newer(0)
    assert first.epoch is not None
    assert first.epoch.number == 5
    assert first.seen is second.seen is built[-1]
    assert len(built) == 1
