"""Whether the run still belongs to this job, according to a real log."""

import asyncio
from dataclasses import replace

from agent.a_term import a_term
from agent.given import a_claim, a_member, an_epoch, wanting
from everstep_agent.coordinator import fence
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.train import train
from everstep_contract import log

OLD = an_epoch(1)
NEW = an_epoch(1, number=2, token="t2", members=(a_member(0, attempt=1),))
"""The same slot in a new pod: no pod is in both epochs."""
FIRST = a_claim(1, token=OLD.token, members=OLD.members[0].ids())
SECOND = a_claim(2, token=NEW.token, members=NEW.members[0].ids())


async def a_term_of_the_old_epoch() -> Term:
    term = a_term(wanting(1))
    assert await term.run_log.append(FIRST)
    term.change(term.state.begin_epoch(OLD))
    return term


async def test_an_epoch_that_this_term_claims_while_the_log_is_read_fences_nobody() -> None:
    term = await a_term_of_the_old_epoch()
    checking = asyncio.create_task(fence.check_fence(term))
    await asyncio.sleep(0)  # it has begun to read
    assert await term.run_log.append(SECOND)
    term.change(term.state.begin_epoch(NEW))
    await checking
    assert not term.ended, term.state.fenced
    await term.close()


async def test_such_a_claim_of_another_coordinator_fences() -> None:
    term = await a_term_of_the_old_epoch()
    rival = replace(SECOND, token="rival")
    await term.context.store.create(log.key(1), log.encode(rival))
    await fence.check_fence(term)
    assert "without any pod of epoch 1" in term.state.fenced
    await term.close()


async def test_a_coordinator_that_reads_the_claim_of_another_job_ends_at_once() -> None:
    """For example because its own commit was refused. It does not wait for the next look at the log."""
    term = await a_term_of_the_old_epoch()
    await term.context.store.create(log.key(1), log.encode(replace(SECOND, job_uid="other")))
    await term.run_log.refresh()
    async with asyncio.timeout(5):
        assert await train(term) == ""
    assert "(other) has taken the run over" in term.state.fenced
    await term.close()
