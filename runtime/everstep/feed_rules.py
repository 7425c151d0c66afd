"""How a feed continues after a resume, when its settings may have been edited. Pure.

The invariant: the next step takes the samples that follow the last one used, in the same order.
Another global batch keeps that: a new segment begins at the next unused sample. Another order
(length, seed, shuffle, content) cannot keep it: which samples were used already is then a question
about an order that no longer exists. Another micro-batch changes no sample and no weight in the
sum. But random numbers are set once for each micro-batch, and batch statistics are taken over it,
so losses differ; that is noted.
"""

from dataclasses import dataclass, replace

from everstep_contract.feed import INDICES, FeedRecord, Order, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that were passed to `job.batches`."""

    global_batch: int
    micro_batch: int
    order: Order


def settings_of(segment: Segment) -> Settings:
    """Return the settings with which a segment was drawn."""
    return Settings(
        global_batch=segment.global_batch, micro_batch=segment.micro_batch, order=segment.order
    )


def list_order_changes(before: Order, now: Order) -> list[str]:
    """List the changes that put other samples at the same places, with both values.

    A dataset that can only be iterated may shuffle with random numbers, which are seeded from the seed
    of the feed (`stream.py`). So another seed counts as another order.
    """
    if before.length != now.length and None in (before.length, now.length):
        return [f"the dataset had {_length(before)}, has {_length(now)}"]
    changes = []
    if before.length != now.length:
        changes.append(f"length was {before.length} samples, is {now.length}")
    if before.length is not None and before.shuffle != now.shuffle:
        changes.append(f"shuffle was {before.shuffle}, is {now.shuffle}")
    elif before.seed != now.seed and (before.length is None or now.shuffle):
        changes.append(f"seed was {before.seed}, is {now.seed}")
    both = before.fingerprint is not None and now.fingerprint is not None
    if both and before.fingerprint != now.fingerprint:
        changes.append(f"fingerprint was {before.fingerprint!r}, is {now.fingerprint!r}")
    return changes


def list_exact_changes(before: Segment | Settings, now: Settings) -> list[str]:
    """List in words the changes that do not affect which samples come next."""
    notes = []
    if before.global_batch != now.global_batch:
        notes.append(
            f"global_batch was {before.global_batch}, is {now.global_batch}: it goes on with the "
            "next unused sample"
        )
    if before.micro_batch != now.micro_batch:
        notes.append(
            f"micro_batch was {before.micro_batch}, is {now.micro_batch}: the samples stay the "
            "same, random numbers and batch statistics do not"
        )
    old, new = before.order, now.order
    if old.seed != new.seed and not list_order_changes(old, new):
        notes.append(
            f"seed was {old.seed}, is {new.seed}: the order does not depend on it, random numbers "
            "do"
        )
    if (old.fingerprint is None) != (new.fingerprint is None):
        given = "is given now, was not" if old.fingerprint is None else "was given, is not now"
        notes.append(f"fingerprint {given}: the data cannot be compared")
    return notes


def describe(settings: Settings) -> str:
    """The settings in words. Of fingerprints only Everstep's own: some libraries choose theirs at random."""
    order = settings.order
    own = order.fingerprint if (order.fingerprint or "").startswith(INDICES) else None
    return (
        f"{_length(order)}, global_batch {settings.global_batch}, micro_batch {settings.micro_batch}, "
        f"shuffle {order.shuffle}, seed {order.seed}" + (f", {own}" if own else "")
    )


def begin(settings: Settings, step: int, sample: int = 0, change: str = "") -> Segment:
    """Make a segment from which nothing has been drawn yet."""
    return Segment(
        step=step,
        sample=sample,
        global_batch=settings.global_batch,
        micro_batch=settings.micro_batch,
        draws=0,
        order=settings.order,
        change=change,
    )


def continue_from(last: Segment, settings: Settings, step: int) -> Segment:
    """Return the segment from which `step` draws: the last one, or a
    new one if the settings differ.

    A new order begins with its first sample, so that each pass over it is complete. If only the
    fingerprint differs, the place is kept: places still mean the same samples, of a dataset with
    other content.
    """
    if settings == settings_of(last):
        return last
    changes = list_order_changes(last.order, settings.order)
    same_places = not list_order_changes(replace(last.order, fingerprint=None), settings.order)
    sample = last.next_sample if same_places else 0
    return begin(settings, step, sample, change="; ".join(changes))


def with_draw(record: FeedRecord | None, segment: Segment) -> FeedRecord:
    """Return the record after one more draw from `segment`, which is its last segment or a new
    one.
    """
    before = record.segments if record else ()
    if before and before[-1] == segment:
        before = before[:-1]
    return FeedRecord(segments=(*before, replace(segment, draws=segment.draws + 1)))


def _length(order: Order) -> str:
    return "no length" if order.length is None else f"{order.length} samples"
