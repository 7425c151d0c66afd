"""Who holds whose copy, and how fast copies are sent."""

from collections import Counter

import pytest

from agent.given import a_member
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.partners import PodPlace, choose_partners, list_places
from everstep_contract.levels import Peer


def pods(*places: str) -> list[PodPlace]:
    """`rack/node` of each slot; a rack may be empty."""
    split = [place.rpartition("/") for place in places]
    return [
        PodPlace(slot=slot, address=f"host-{slot}", node=node, rack=rack)
        for slot, (rack, _, node) in enumerate(split)
    ]


def choose(*places: str) -> dict[int, int]:
    return {slot: partner.slot for slot, partner in choose_partners(pods(*places)).items()}


def test_each_pods_copy_is_at_the_next_pod() -> None:
    assert choose("a", "b", "c") == {0: 1, 1: 2, 2: 0}
    assert choose("a", "b") == {0: 1, 1: 0}
    assert choose("a") == {}
    assert choose() == {}


@pytest.mark.parametrize(
    "nodes", ["aabb", "abab", "aabbcc", "aaabbb", "aabc", "abcabcabc", "aaaabbcc", "abbccc"]
)
def test_no_copy_lies_on_its_own_node_and_each_pod_holds_one(nodes: str) -> None:
    found = choose(*nodes)
    assert set(found) == set(range(len(nodes)))
    assert all(nodes[slot] != nodes[partner] for slot, partner in found.items())
    assert set(Counter(found.values()).values()) == {1}


def test_where_one_node_has_most_pods_the_others_hold_more_than_one_copy() -> None:
    found = choose("a", "a", "a", "b")
    assert found[0] == found[1] == found[2] == 3
    assert found[3] in (0, 1, 2)


@pytest.mark.parametrize("racks", ["a" * 10 + "b" * 6, "b" + "a" * 6 + "cc", "a" * 34 + "bb"])
def test_where_one_rack_has_most_pods_the_others_hold_equally_many_copies(racks: str) -> None:
    found = choose(*(f"{rack}/{node}" for node, rack in enumerate(racks)))
    assert all(racks[slot] != racks[partner] for slot, partner in found.items())
    held = Counter(found.values())
    others = [held[slot] for slot, rack in enumerate(racks) if rack != "a"]
    assert len(found) == len(racks)
    assert max(others) - min(others) <= 1


def test_pods_of_one_node_have_no_partner() -> None:
    assert choose("a", "a", "a") == {}


def test_a_copy_lies_in_another_rack_where_racks_are_known() -> None:
    places = ["r1/a", "r1/b", "r2/c", "r2/d", "r1/e", "r2/f"]
    found = choose(*places)
    assert all(places[slot][:2] != places[partner][:2] for slot, partner in found.items())
    assert len(set(found.values())) == 6


def test_a_rack_that_is_not_known_counts_for_nothing() -> None:
    assert choose("r1/a", "r1/b", "c") == choose("a", "b", "c")
    assert choose("r1/a", "r1/b", "r1/c") == choose("a", "b", "c")


def test_the_order_in_which_pods_are_named_changes_nothing() -> None:
    known = pods("a", "b", "b", "c", "a")
    assert choose_partners(reversed(known)) == choose_partners(known)


def test_a_pod_whose_node_nobody_names_counts_as_on_its_own() -> None:
    members = [a_member(slot) for slot in range(3)]
    peers = [
        Peer(slot=0, attempt=0, address="host-0", node="n", rack="r"),
        Peer(slot=1, attempt=7, address="of another attempt", node="n"),
    ]
    found = list_places(members, peers)
    assert [(p.node, p.rack) for p in found] == [("n", "r"), ("slot 1", ""), ("slot 2", "")]


async def test_what_is_sent_stays_below_the_rate() -> None:
    now, sent = [100.0], []

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    budget = Budget(1000.0, lambda: now[0], sleep)
    for _ in range(5):
        await budget.take(500)
        sent.append(now[0] - 100)
    assert sent == [0.0, 0.5, 1.0, 1.5, 2.0]
    now[0] += 3600
    for _ in range(2):
        await budget.take(500)
        sent.append(now[0] - 3702)
    assert sent[-2:] == [0.0, 0.5], "an hour without copies gives no credit"
