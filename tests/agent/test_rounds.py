from agent.given import a_claim, a_member, a_report, an_epoch, ended, wanting
from everstep_agent.coordinator import rounds
from everstep_agent.peers.epoch_level import Stage
from everstep_contract import levels, log
from everstep_contract.units import ONE_RANK, Mesh


def decide(reports, wanted, *, waited=0.0, gang=300.0, former=(), mesh=ONE_RANK):
    return rounds.decide_epoch(
        reports, wanted, round=1, waited=waited, gang=gang, former=former, mesh=mesh
    )


def test_an_epoch_starts_when_every_wanted_slot_has_joined_and_ranks_follow_slot_order():
    found = decide([a_report(2), a_report(0), a_report(1)], wanting(3))
    assert isinstance(found, rounds.Start)
    assert [(m.slot, m.node_rank) for m in found.members] == [(0, 0), (1, 1), (2, 2)]


def test_an_agent_that_has_not_joined_this_round_does_not_count():
    found = decide([a_report(0), a_report(1, joined=0)], wanting(2))
    assert isinstance(found, rounds.Wait)
    assert found.reason == "TooFewWorkers"
    assert "1 of 2" in found.message


def test_an_agent_whose_workers_are_not_ready_does_not_count():
    assert isinstance(decide([a_report(0, fresh=())], wanting(1)), rounds.Wait)


def test_fewer_than_wanted_start_only_after_the_gang_time():
    wanted = levels.Wanted(min_workers=1, want_workers=3, max_workers=3)
    waits = decide([a_report(0), a_report(1)], wanted, waited=10.0, gang=60.0)
    assert isinstance(waits, rounds.Wait)
    assert waits.reason == "WaitingForGang"
    starts = decide([a_report(0), a_report(1)], wanted, waited=61.0, gang=60.0)
    assert isinstance(starts, rounds.Start)
    assert len(starts.members) == 2


def test_more_than_wanted_start_with_the_lowest_slots():
    found = decide([a_report(s) for s in (3, 1, 0)], wanting(2))
    assert isinstance(found, rounds.Start)
    assert [m.slot for m in found.members] == [0, 1]


def test_of_more_than_wanted_those_that_trained_before_go_on_and_the_rest_are_spares():
    reports = [a_report(0), a_report(1, attempt=1), a_report(2), a_report(3)]
    found = decide(reports, wanting(3), former={(0, 0), (1, 0), (2, 0), (3, 0)})
    assert isinstance(found, rounds.Start)
    assert [(m.slot, m.node_rank) for m in found.members] == [(0, 0), (2, 1), (3, 2)]


def slots_of(found):
    assert isinstance(found, rounds.Start), found
    return [m.slot for m in found.members]


FOUR = {"mesh": Mesh(shard=2, tensor=2), "waited": 61.0, "gang": 60.0}


def test_an_epoch_has_whole_units_and_the_rest_are_spares():
    wanted = wanting(8, min_workers=4)
    reports = [a_report(s) for s in range(8)]
    assert slots_of(decide(reports, wanted, **FOUR)) == list(range(8))
    assert slots_of(decide(reports[1:], wanted, **FOUR)) == [4, 5, 6, 7], "neighbors form a unit"
    assert slots_of(decide([reports[s] for s in (0, 2, 3, 6)], wanted, **FOUR)) == [0, 2, 3, 6]
    waits = decide(reports[:3], wanted, **FOUR)
    assert isinstance(waits, rounds.Wait)
    assert waits.reason == "TooFewWorkers"
    assert waits.message.startswith("3 of 8 slots are ready, 0 of them in whole units; at least 4")
    later = decide(reports[:7], wanted, **(FOUR | {"waited": 10.0}))
    assert isinstance(later, rounds.Wait)
    assert later.message == (
        "7 of 8 slots are ready, 4 of them in whole units; starting smaller in 50 s"
    )


def test_neighbours_form_a_unit_and_what_is_left_forms_others():
    wanted, pairs = wanting(4, min_workers=2), FOUR | {"mesh": Mesh(shard=2)}
    assert slots_of(decide([a_report(s) for s in (0, 2, 3)], wanted, **pairs)) == [2, 3]
    found = decide([a_report(s) for s in (0, 2, 3, 5)], wanted, **pairs)
    assert slots_of(found) == [0, 5, 2, 3], "units are ordered by their lowest slots"
    assert isinstance(found, rounds.Start)
    assert [(m.node_rank, m.first) for m in found.members] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_the_units_of_which_the_most_pods_trained_before_go_on():
    reports, pairs = [a_report(s) for s in range(6)], Mesh(shard=2)

    def chosen(want, *trained):
        former = {(s, 0) for s in trained}
        return slots_of(decide(reports, wanting(want), former=former, mesh=pairs))

    assert chosen(4, 2, 3, 4, 5) == [2, 3, 4, 5]
    assert chosen(4, 1, 4, 5) == [0, 1, 4, 5]
    assert chosen(2, 1, 2, 4, 5) == [4, 5]
    assert chosen(2, 3, 5) == [2, 3], "of equal choices the lowest slots count"


def test_pods_that_hold_whole_units_count_one_by_one():
    reports = [a_report(s, fresh=(1, 1, 1, 1)) for s in range(3)]
    wanted = wanting(4, min_workers=1)
    for mesh in (Mesh(shard=2), Mesh(shard=4)):
        found = decide(reports, wanted, **(FOUR | {"mesh": mesh}))
        assert slots_of(found) == [0, 1, 2]
    assert slots_of(decide(reports, wanted, **(FOUR | {"mesh": Mesh(shard=8)}))) == [0, 1]


def test_spares_are_the_pods_beside_a_running_epoch_whose_workers_wait_for_one():
    epoch = an_epoch(2)
    reports = [
        a_report(0, epoch=1, fresh=()),
        a_report(1, attempt=1),
        a_report(2),
        a_report(3, fresh=()),
        a_report(4, leaving=True),
        a_report(5, fresh=(1, 0)),
    ]

    def spares(epoch, **changes):
        return [r.slot for r in rounds.list_spares(epoch, reports, wanting(2, **changes))]

    assert spares(epoch) == [2], "the next pod of a lost member is no spare yet"
    assert spares(epoch, leave=(2,)) == []
    assert spares(an_epoch(2, joining=(a_member(2),))) == []
    assert spares(an_epoch(2, stage=Stage.HOLD)) == []
    assert spares(None) == []


def test_nobody_joins_who_is_gone_dead_leaving_or_of_an_old_attempt():
    one = levels.SlotAttempt(slot=1, attempt=0)
    dead = levels.DeadAgent(slot=1, attempt=0, incarnation=1)
    newer = levels.Peer(slot=1, attempt=1, address="x")
    reports = [a_report(0), a_report(1)]
    for changes in ({"gone": (one,)}, {"dead": (dead,)}, {"leave": (1,)}, {"peers": (newer,)}):
        assert isinstance(decide(reports, wanting(2, **changes)), rounds.Wait), changes
    assert isinstance(decide([a_report(0), a_report(1, leaving=True)], wanting(2)), rounds.Wait)


def test_of_two_attempts_of_a_slot_the_newer_joins():
    found = decide([a_report(0, attempt=1), a_report(0, attempt=0)], wanting(1))
    assert isinstance(found, rounds.Start)
    assert found.members[0].attempt == 1


def test_a_restarted_container_may_join_though_its_last_life_was_reported_dead():
    dead = levels.DeadAgent(slot=0, attempt=0, incarnation=1)
    found = decide([a_report(0, incarnation=2)], wanting(1, dead=(dead,)))
    assert isinstance(found, rounds.Start)


def test_an_ended_life_reported_by_its_agent_is_proof():
    claim = a_claim()
    proof = rounds.build_proof(claim, [a_report(0, ended=ended(1))], wanting(1))
    assert claim.members[0] in proof.dead
    assert not rounds.build_proof(claim, [a_report(0, ended=ended(0))], wanting(1)).dead


def test_a_newer_attempt_among_the_peers_declares_the_older_gone():
    peer = levels.Peer(slot=0, attempt=2, address="x")
    assert (0, 1) in rounds.build_proof(a_claim(), [], wanting(1, peers=(peer,))).gone


def test_an_epoch_number_is_never_used_twice():
    reports = [a_report(0, joined=4), a_report(1, epoch=3)]
    assert rounds.next_number(2, reports, burnt=0) == 5
    assert rounds.next_number(7, reports, burnt=0) == 8
    assert rounds.next_number(2, reports, burnt=9) == 10


def test_a_round_that_somebody_has_outrun_gets_a_higher_number():
    stays, outrun = a_report(0, joined=2), a_report(1, joined=3)
    assert rounds.choose_number(2, 1, [stays], 0) == 2
    assert rounds.choose_number(2, 1, [stays, outrun], 0) == 4
    assert rounds.choose_number(2, 2, [stays], 0) == 3
    assert rounds.choose_number(2, 1, [stays], 2) == 3


def test_repeats_count_only_the_newest_claims_of_one_cause_at_one_step():
    claims = [
        a_claim(1, cause="Start"),
        a_claim(2, cause="UserError", failed=4),
        a_claim(3, cause="UserError", failed=5),
        a_claim(4, cause="UserError", failed=5, chain=(log.ChainLink(epoch=1, last_step=3),)),
    ]
    assert rounds.count_repeats(claims, "UserError", 5) == 2
    assert rounds.count_repeats(claims, "WorkerDied", 5) == 0
    assert rounds.count_repeats(claims[:1], "Start", 0) == 1
