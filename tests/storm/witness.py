"""Judges a storm by what it left behind. Pure functions that use none of Everstep's code.

Each check yields its objections as text; a correct run has none. The reference is an undisturbed
run. For the toy model it is computed here from the seed; for torch it is a separate run.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from storm import toy
from storm.evidence import Evidence, Life, Strike, read_tensors

ANSWER_SECONDS = 180.0
"""Time limit from a strike to the first new step after it."""
SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The steps and the state of an undisturbed run."""

    digests: tuple[str, ...]
    """Digests of the state after 0, 1, … steps."""
    samples: Mapping[int, tuple[int, ...]]
    """Step → its samples, sorted."""
    tensors: Mapping[str, bytes]
    """Tensors of the last checkpoint, by name."""

    @property
    def until(self) -> int:
        return len(self.digests) - 1


def judge(evidence: Evidence, reference: Reference) -> list[str]:
    """Return the objections, at most `SHOWN` from each of `checks`."""
    found = list(check_writers(evidence.entries))
    if [e["step"] for e in evidence.entries if e["kind"] == "done"] != [reference.until]:
        found.append(f"the log does not end with the end of the run at step {reference.until}")
    lineage = list_lineage(evidence.entries)
    checks = (
        check_lives(evidence.lives, reference.digests),
        check_steps(evidence.lives, lineage, reference.until),
        check_samples(evidence.lives, lineage, reference.samples),
        check_lost(evidence.lives, evidence.strikes),
        check_final(evidence, reference),
        check_answers(evidence.lives, evidence.strikes, reference.until),
    )
    for check in checks:
        found += [text for text, _ in zip(check, range(SHOWN), strict=False)]
    return found


def compute(seed: int, until: int) -> Reference:
    """Compute the reference of the toy model from the seed."""
    states = list_states(seed, until)
    return Reference(
        digests=tuple(toy.digest_of(v) for v in states),
        samples={s: tuple(toy.samples_of(s)) for s in range(1, until + 1)},
        tensors={"weight": toy.pack(states[-1])},
    )


def take(evidence: Evidence) -> Reference:
    """Read the reference from an undisturbed run, which has a single epoch. Raises AssertionError if
    the run was disturbed.
    """
    assert {life.epoch for life in evidence.lives} == {1}, "the reference was disturbed"
    first = evidence.lives[0]
    samples: dict[int, list[int]] = defaultdict(list)
    for life in evidence.lives:
        for step, given in life.used:
            samples[step] += given
    last = [e for e in evidence.entries if e["kind"] == "commit"][-1]
    manifest = json.loads(evidence.objects[last["manifest"]])
    return Reference(
        digests=(first.digest, *(digest for _, digest, _ in first.applied)),
        samples={step: tuple(sorted(given)) for step, given in samples.items()},
        tensors=read_tensors(evidence.objects, manifest),
    )


def list_states(seed: int, until: int) -> list[list[int]]:
    """Return the toy model's state after 0, 1, … `until` steps of an undisturbed run."""
    states = [[0] * toy.LENGTH]
    for step in range(1, until + 1):
        summed = toy.contribution(seed, toy.samples_of(step))
        states.append(toy.advance(states[-1], summed))
    return states


def check_writers(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Only one epoch writes at a time: each entry after a claim belongs to that claim's epoch,
    until the next claim.
    """
    newest: Mapping[str, Any] | None = None
    done = False
    committed = 0
    for place, entry in enumerate(entries):
        what = f"place {place}: {entry['kind']} of epoch {entry['epoch']}"
        if entry["kind"] == "claim":
            if newest is not None and entry["epoch"] <= newest["epoch"]:
                yield f"{what} after the claim of epoch {newest['epoch']}"
            if newest is not None and not _continues(entry["chain"], newest):
                yield f"{what} does not continue the claim of epoch {newest['epoch']}"
            if _resumes_at(entry) < committed:
                yield f"{what} resumes at {_resumes_at(entry)}, {committed} was committed"
            newest = entry
        elif newest is None or entry["epoch"] != newest["epoch"]:
            yield f"{what} though the newest claim is another epoch's"
        if done and entry["kind"] in ("claim", "commit"):
            yield f"{what} after the end"
        done = done or entry["kind"] == "done"
        committed = entry["step"] if entry["kind"] == "commit" else committed


def _resumes_at(claim: Mapping[str, Any]) -> int:
    return int(claim["chain"][-1]["last_step"]) if claim["chain"] else 0


def _continues(chain: Sequence[Mapping[str, Any]], before: Mapping[str, Any]) -> bool:
    """Return whether the chain begins with the former claim's chain. Links that end where the link
    before them ends are ignored.
    """
    former = _cuts(before["chain"])
    return _cuts(chain)[: len(former)] == former


def _cuts(chain: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for link in chain:
        if link["last_step"] > (found[-1][1] if found else 0):
            found.append((link["epoch"], link["last_step"]))
    return found


def list_lineage(entries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Step → the epoch that took it, along the chain of the last claim up to the last commit."""
    claims = [e for e in entries if e["kind"] == "claim"]
    commits = [e for e in entries if e["kind"] == "commit"]
    if not claims or not commits:
        return {}
    found: dict[int, int] = {}
    last = {"epoch": claims[-1]["epoch"], "last_step": commits[-1]["step"]}
    for epoch, end in _cuts([*claims[-1]["chain"], last]):
        found |= dict.fromkeys(range(len(found) + 1, end + 1), epoch)
    return found


def check_lives(lives: Sequence[Life], digests: Sequence[str]) -> Iterator[str]:
    """Each life began with the reference's state, took each following step once, and had the
    reference's state after each. In an epoch, only one life took steps as a given rank.
    """
    for life in lives:
        if life.digest != digests[life.start]:
            yield f"{life.name} began at step {life.start} with another state"
        steps = [step for step, _, _ in life.applied]
        if steps != list(range(life.start + 1, life.start + 1 + len(steps))):
            yield f"{life.name} began at {life.start} and applied {_brief(steps)}"
        for step, digest, _ in life.applied:
            if step >= len(digests) or digest != digests[step]:
                yield f"{life.name} held another state after step {step}"
    places = Counter((x.epoch, x.rank) for x in lives if x.applied)
    for (epoch, rank), count in places.items():
        if count > 1:
            yield f"{count} lives took steps as rank {rank} of epoch {epoch}"


def check_steps(lives: Sequence[Life], lineage: Mapping[int, int], until: int) -> Iterator[str]:
    """Every step of the lineage was applied by all ranks of its epoch. For an epoch's last two
    steps one rank is enough, except for the run's last step.
    """
    if sorted(lineage) != list(range(1, until + 1)):
        yield f"the lineage has the steps {_brief(sorted(lineage))}, not 1..{until}"
    ends = {epoch: step for step, epoch in sorted(lineage.items())}
    who: dict[tuple[int, int], set[int]] = defaultdict(set)
    world: dict[int, int] = {}
    for life in lives:
        world[life.epoch] = life.world
        for step, _, _ in life.applied:
            who[step, life.epoch].add(life.rank)
    for step, epoch in lineage.items():
        least = 1 if step > ends[epoch] - 2 and step != until else world.get(epoch, 1)
        if len(who[step, epoch]) < least:
            yield f"step {step} of epoch {epoch} was applied by the ranks {sorted(who[step, epoch])}"


def check_samples(
    lives: Sequence[Life], lineage: Mapping[int, int], samples: Mapping[int, Sequence[int]]
) -> Iterator[str]:
    """For each step, the ranks of its epoch used each of its samples once, and no other sample."""
    given: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for life in lives:
        for step, part in life.used:
            given[step, life.epoch].update(part)
    for step, epoch in lineage.items():
        expected = Counter(samples.get(step, ()))
        if given[step, epoch] != expected:
            missing = sorted((expected - given[step, epoch]).elements())
            besides = sorted((given[step, epoch] - expected).elements())
            yield f"step {step} of epoch {epoch}: samples missing {missing}, besides {besides}"


def check_lost(lives: Sequence[Life], strikes: Sequence[Strike]) -> Iterator[str]:
    """A step is taken again only if all lives that held it were hurt."""
    hurt = {life for strike in strikes if strike.hurts for life in struck(lives, strike)}
    held: dict[int, list[Life]] = defaultdict(list)
    for life in sorted(lives, key=lambda x: x.epoch):
        for step, _, _ in life.applied:
            for former in held[step]:
                if former.epoch < life.epoch and former not in hurt:
                    yield f"step {step}, which {former.name} held unhurt, was taken anew in epoch {life.epoch}"
            held[step].append(life)


def struck(lives: Sequence[Life], strike: Strike) -> list[Life]:
    """Return the pod's newest life at the moment of the strike; empty if none had begun."""
    of_pod = [x for x in lives if (x.slot, x.attempt) == (strike.slot, strike.attempt)]
    before = [x for x in of_pod if x.born <= strike.at]
    return [max(before, key=lambda x: x.born)] if before else []


def check_final(evidence: Evidence, reference: Reference) -> Iterator[str]:
    """The last checkpoint holds the reference's bytes, and its manifest is the one that its commit names."""
    commits = [e for e in evidence.entries if e["kind"] == "commit"]
    if not commits:
        yield "nothing was committed"
        return
    last = commits[-1]
    raw = evidence.objects.get(last["manifest"], b"")
    if hashlib.sha256(raw).hexdigest() != last["digest"]:
        yield f"the manifest {last['manifest']} is not the one that was committed"
        return
    manifest = json.loads(raw)
    for chunk in manifest["chunks"]:
        body = evidence.objects.get(chunk["key"], b"")
        if "b3-" + blake3(body).hexdigest() != chunk["digest"]:
            yield f"the chunk {chunk['key']} has other bytes"
    steps = {last["step"], manifest["step"], reference.until}
    if len(steps) != 1:
        yield f"the last checkpoint's steps differ: {sorted(steps)}"
    try:
        tensors = read_tensors(evidence.objects, manifest)
    except (KeyError, AssertionError) as error:
        yield f"the last checkpoint cannot be read: {error!r}"
        return
    if tensors.keys() != reference.tensors.keys():
        yield f"the last checkpoint holds {sorted(tensors)}, an undisturbed run {sorted(reference.tensors)}"
    for name in sorted(tensors.keys() & reference.tensors.keys()):
        if tensors[name] != reference.tensors[name]:
            yield f"in the last checkpoint {name} is not what it is in an undisturbed run"


def check_answers(lives: Sequence[Life], strikes: Sequence[Strike], until: int) -> Iterator[str]:
    """After each strike the job took, within the limit, a step that no rank had taken before."""
    steps = sorted((at, step) for life in lives for step, _, at in life.applied)
    for strike in strikes:
        before = max((step for at, step in steps if at <= strike.at), default=0)
        later = [at for at, step in steps if at > strike.at and step > before]
        if before < until and (not later or later[0] - strike.at > ANSWER_SECONDS):
            yield f"no new step within {ANSWER_SECONDS:.0f} s after {strike.kind} at step {before}"


def _brief(steps: Sequence[int]) -> str:
    return f"{steps[:5]} … {steps[-5:]}" if len(steps) > 10 else str(list(steps))
