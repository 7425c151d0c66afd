"""The witness objects to forged histories, but not to the true one from which they are made."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from storm import plan, toy, witness
from storm.evidence import Evidence, Life, Strike, read_life, read_tensors

SEED, UNTIL, CUT = 7, 12, 6
STATES = witness.list_states(SEED, UNTIL)
STRUCK_AT = 8.5


def life(epoch: int, slot: int, first: int, last: int, *, born: float) -> Life:
    steps = range(first, last + 1)
    return Life(
        slot=slot,
        attempt=0,
        epoch=epoch,
        rank=slot,
        world=2,
        start=first - 1,
        digest=toy.digest_of(STATES[first - 1]),
        born=born,
        used=tuple((s, toy.share_of(s, slot, 2)) for s in steps),
        applied=tuple((s, toy.digest_of(STATES[s]), born + s) for s in steps),
    )


def link(epoch: int, step: int) -> dict[str, int]:
    return {"epoch": epoch, "last_step": step}


def committed(epoch: int, step: int, objects: dict[str, bytes]) -> dict[str, object]:
    body = toy.pack(STATES[step])
    digest = "b3-" + blake3(body).hexdigest()
    manifest = {
        "step": step,
        "state": {"step": step},
        "chunks": [{"digest": digest, "key": f"chunks/{digest}"}],
        "tensors": [
            {
                "name": "weight",
                "dtype": "float64",
                "shape": [toy.LENGTH],
                "pieces": [{"offsets": [0], "lengths": [toy.LENGTH], "chunk": digest, "at": 0}],
            }
        ],
    }
    raw, key = json.dumps(manifest).encode(), f"manifests/{epoch}-{step}"
    objects |= {f"chunks/{digest}": body, key: raw}
    return {
        "kind": "commit",
        "epoch": epoch,
        "step": step,
        "manifest": key,
        "digest": hashlib.sha256(raw).hexdigest(),
    }


def true_story() -> Evidence:
    """Two ranks train. Slot 1 is killed after step 6, and slot 0 saves that step."""
    objects: dict[str, bytes] = {}
    entries = (
        {"kind": "claim", "epoch": 1, "chain": []},
        committed(1, CUT, objects),
        {"kind": "claim", "epoch": 2, "chain": [link(1, CUT)]},
        committed(2, UNTIL, objects),
        {"kind": "done", "epoch": 2, "step": UNTIL},
    )
    return Evidence(
        entries=entries,
        objects=objects,
        lives=(
            life(1, 0, 1, CUT, born=1.0),
            life(1, 1, 1, CUT, born=1.0),
            life(2, 0, CUT + 1, UNTIL, born=10.0),
            life(2, 1, CUT + 1, UNTIL, born=10.0),
        ),
        strikes=(Strike(kind="kill worker", at=STRUCK_AT, hurts=True, slot=1, attempt=0),),
    )


def judge(evidence: Evidence) -> list[str]:
    return witness.judge(evidence, witness.compute(SEED, UNTIL))


Forgery = Callable[[Evidence], Evidence]


def change(number: int, **changes: object) -> Forgery:
    def forge(e: Evidence) -> Evidence:
        lives = list(e.lives)
        lives[number] = replace(lives[number], **changes)  # type: ignore[arg-type]
        return replace(e, lives=tuple(lives))

    return forge


def entries(*order: int, **changes: object) -> Forgery:
    """Keep these of the true entries, in this order, and change the last one."""

    def forge(e: Evidence) -> Evidence:
        found = [dict(e.entries[n]) for n in order]
        found[-1] |= changes
        return replace(e, entries=tuple(found))

    return forge


def spoil_chunk(e: Evidence) -> Evidence:
    last = json.loads(e.objects[f"manifests/2-{UNTIL}"])["chunks"][0]["key"]
    return replace(e, objects={**e.objects, last: bytes(8 * toy.LENGTH)})


def other_checkpoint(e: Evidence) -> Evidence:
    """A complete and consistent checkpoint, but not the one that an undisturbed run holds."""
    objects: dict[str, bytes] = {}
    states = STATES[UNTIL]
    STATES[UNTIL] = [1, 2, 3, 4]
    entry = committed(2, UNTIL, objects)
    STATES[UNTIL] = states
    return replace(e, objects=objects, entries=(*e.entries[:3], entry, e.entries[4]))


def resumes_too_early(e: Evidence) -> Evidence:
    """Epoch 2 takes step 6 again, although slot 0 held it and was unhurt."""
    again = tuple(life(2, slot, CUT, UNTIL, born=10.0) for slot in (0, 1))
    claim = {**e.entries[2], "chain": [link(1, CUT - 1)]}
    log = (e.entries[0], claim, *e.entries[3:])
    return replace(e, lives=(*e.lives[:2], *again), entries=log)


def never_goes_on(e: Evidence) -> Evidence:
    stopped = tuple(life(2, slot, CUT + 1, UNTIL - 2, born=10.0) for slot in (0, 1))
    late = Strike(kind="edit", at=30.0, hurts=False)
    return replace(e, lives=(*e.lives[:2], *stopped), strikes=(*e.strikes, late))


def give(slot: int, samples: tuple[int, ...]) -> Forgery:
    used = life(2, slot, CUT + 1, UNTIL, born=10.0).used
    return change(2 + slot, used=((CUT + 1, samples), *used[1:]))


SHARE = toy.share_of(CUT + 1, 0, 2)
APPLIED = life(2, 0, CUT + 1, UNTIL, born=10.0).applied
FORGED: dict[str, tuple[Forgery, str]] = {
    "a step left out by one rank": (change(2, applied=APPLIED[:2] + APPLIED[3:]), "applied"),
    "a step taken by one rank only": (change(2, applied=APPLIED[:1]), "applied by the ranks [1]"),
    "a step twice": (change(2, applied=APPLIED[:3] + APPLIED[2:]), "and applied"),
    "another state": (
        change(2, applied=((CUT + 1, "00", 17.0), *APPLIED[1:])),
        f"another state after step {CUT + 1}",
    ),
    "another state to begin with": (change(3, digest="00"), "began at step 6 with another state"),
    "a sample twice": (give(1, (SHARE[0], *toy.share_of(CUT + 1, 1, 2))), f"besides [{SHARE[0]}]"),
    "a sample missing": (give(0, SHARE[1:]), f"samples missing [{SHARE[0]}]"),
    "two of one rank": (change(3, rank=0), "2 lives took steps as rank 0"),
    "a step of the unhurt taken anew": (resumes_too_early, "which slot 0 attempt 0 in epoch 1 held unhurt"),
    "a commit after another's claim": (entries(0, 2, 1, 3, 4), "though the newest claim is another epoch's"),
    "two claims of one epoch": (entries(0, 1, 2, 2, 3, 4), "after the claim of epoch 2"),
    "a claim that goes back": (entries(0, 1, 2, chain=[link(1, 3)]), "6 was committed"),
    "a claim of another history": (
        lambda e: replace(
            e,
            entries=(
                *e.entries[:3],
                {"kind": "claim", "epoch": 3, "chain": [link(1, 4), link(2, 9)]},
            ),
        ),
        "does not continue the claim of epoch 2",
    ),
    "a commit after the end": (entries(0, 1, 2, 3, 4, 3), "after the end"),
    "no end": (entries(0, 1, 2, 3), "does not end"),
    "an early end": (entries(0, 1, 2, 3, 4, step=9), "the log does not end"),
    "a shorter lineage": (entries(0, 1, 2, 3, step=9), "not 1..12"),
    "nothing committed": (entries(0), "nothing was committed"),
    "another manifest": (entries(0, 1, 2, 3, digest="00"), "is not the one that was committed"),
    "a chunk of zeros": (spoil_chunk, "has other bytes"),
    "another checkpoint": (other_checkpoint, "weight is not what it is"),
    "a recovery that did not end": (never_goes_on, "no new step within"),
}  # fmt: skip


def test_the_true_story_meets_no_objection() -> None:
    assert judge(true_story()) == []


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_story_is_objected_to(name: str) -> None:
    forge, words = FORGED[name]
    found = judge(forge(true_story()))
    assert any(words in text for text in found), found


def test_a_step_that_only_hurt_members_held_may_be_taken_anew() -> None:
    told = true_story()
    ahead = replace(
        told.lives[1],
        applied=(*told.lives[1].applied, (CUT + 1, toy.digest_of(STATES[CUT + 1]), 8.0)),
    )
    hurt = replace(told, lives=(told.lives[0], ahead, *told.lives[2:]))
    assert judge(hurt) == []
    assert judge(replace(hurt, strikes=())) != []


def test_the_last_line_of_a_killed_worker_may_be_cut_short(tmp_path: Path) -> None:
    head = dict.fromkeys(("slot", "attempt", "epoch", "rank", "world", "start"), 1)
    lines = [{**head, "digest": "d", "at": 1.0}, {"used": 2, "samples": [1], "at": 2.0}]
    path = tmp_path / "life"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"applied": 2, "dig')
    found = read_life(path)
    assert (found.used, found.applied) == (((2, (1,)),), ())


def test_a_tensor_of_several_pieces_is_read_whole_or_not_at_all() -> None:
    def manifest(*pieces: tuple[int, int, int]) -> dict[str, object]:
        held = [
            {"offsets": [o, 0], "lengths": [n, 2], "chunk": "d", "at": at} for o, n, at in pieces
        ]
        tensor = {"name": "w", "dtype": "float32", "shape": [3, 2], "pieces": held}
        return {"chunks": [{"digest": "d", "key": "k"}], "tensors": [tensor]}

    objects = {"k": bytes(range(24))}
    assert read_tensors(objects, manifest((1, 2, 0), (0, 1, 16)))["w"] == bytes(
        [*range(16, 24), *range(16)]
    )
    for pieces in (((0, 1, 0),), ((0, 2, 0), (1, 2, 8)), ((0, 3, 8),)):
        with pytest.raises(AssertionError):
            read_tensors(objects, manifest(*pieces))


def test_a_reference_that_was_disturbed_is_none() -> None:
    told = true_story()
    with pytest.raises(AssertionError, match="disturbed"):
        witness.take(told)
    quiet = replace(
        told,
        lives=tuple(life(1, slot, 1, UNTIL, born=1.0) for slot in (0, 1)),
    )
    assert witness.take(quiet) == witness.compute(SEED, UNTIL)


def test_a_plan_depends_on_its_seed_alone_and_strikes_with_every_kind() -> None:
    rounds = len(plan.KINDS) // 2
    drawn = plan.draw(3, 3, rounds)
    assert drawn == plan.draw(3, 3, rounds) != plan.draw(4, 3, rounds)
    assert sorted(s.kind for strikes in drawn for s in strikes) == sorted(plan.KINDS)
    for one, other in drawn:
        assert one.slot is None or one.slot != other.slot
