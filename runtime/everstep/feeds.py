"""The feeds of a job: their names, and how far each has been used.

A draw is counted when its step is marked as applied, on every rank. So the samples of a step that
was not applied are used again, and those of an applied step never are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from everstep import feed_rules
from everstep.batches import Batches
from everstep.errors import Misuse, StateError
from everstep.feed_rules import Settings
from everstep_contract import codec
from everstep_contract.feed import FeedRecord, Segment, encode_records

SETTINGS_KEY = "feed_settings"
"""Key in the state tree: the settings of every feed that the script has made, also of one that no step
has drawn from since they were edited. Newcomers read them; trees of older versions have none.
"""
CONTINUE = "Continue"
ON_CHANGE = ("Refuse", CONTINUE)


class Feeds:
    """The feeds that the script has made, and their records.

    Args:
        records: of the checkpoint; None: it was written by a version that did not record feeds.
        applied: step of the checkpoint; 0 without one.
        note: adds a sentence to the job's status.
    """

    def __init__(
        self,
        records: dict[str, FeedRecord] | None,
        *,
        applied: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._recorded = records is not None
        self._records = dict(records or {})
        self._applied = applied
        self._note = note
        self._made: dict[str, Batches] = {}
        self._accepted: set[str] = set()
        self._unnamed = 0
        self._pending: dict[str, Segment] = {}
        self._closed = False

    def choose_name(self, name: str | None) -> str:
        """Feeds without a name are numbered 1, 2, … as the script makes them."""
        if name is not None:
            return name
        self._unnamed += 1
        return str(self._unnamed)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """If an exception ends it, no feed was made within it: a script may catch the exception, and call job.batches
        again.
        """
        before = self._made.copy(), self._accepted.copy(), self._unnamed
        try:
            yield
        except BaseException:
            self._made, self._accepted, self._unnamed = before
            raise

    def add(self, made: Batches, *, on_change: str) -> None:
        """Add a feed that the script has made. One that is made after
        `close` serves `job.evaluate` only.

        Raises:
            Misuse: another feed has the same name.
            StateError: it cannot exactly continue the checkpoint's feed of this name.
        """
        if self._closed:
            return
        if made.name in self._made:
            raise Misuse(
                f"job.batches: two feeds have the name {made.name!r}; give one of them another name"
            )
        self._made[made.name] = made
        if on_change == CONTINUE:
            self._accepted.add(made.name)
        record = self._records.get(made.name)
        if record is not None and on_change != CONTINUE:
            self._require_same_order(made, record.last)

    def close(self) -> None:
        """Begin training: every feed that a step may draw from has been made."""
        self._closed = True

    def describe(self) -> dict[str, str]:
        """Name → settings in words, which are the same on every rank."""
        return {name: feed_rules.describe(made.settings) for name, made in self._made.items()}

    def adopt(
        self,
        records: dict[str, FeedRecord] | None,
        applied: int,
        settings: Mapping[str, Settings] | None = None,
    ) -> None:
        """Continue at the position of another member.

        Args:
            settings: of that member's feeds. A feed that is not among them is compared with its last segment.

        Raises:
            StateError: a feed differs from that member's feed of this name, so this rank's
                micro-batches would hold other samples.
        """
        known = dict(records or {})
        theirs = {name: feed_rules.settings_of(record.last) for name, record in known.items()}
        theirs |= settings or {}
        for name, made in self._made.items():
            if name in theirs:
                _require_equal(made, theirs[name], drawn=name in known)
        self._records, self._applied = known, applied

    def draw(self, made: Batches, step: int) -> int:
        """Return the place of the first sample of `step`; it is the same for every loop of the step.

        Raises:
            Misuse: the feed was made inside the loop over `job.steps`.
            StateError: the checkpoint has a feed that no feed of the script continues, and this one
                is new.
        """
        if self._made.get(made.name) is not made:
            raise Misuse(
                "step.batches: this feed was made inside the loop over job.steps, so it would start "
                "again at each step; call job.batches once, before the loop"
            )
        if made.name not in self._pending:
            self._pending[made.name] = self._segment(made, step)
        return self._pending[made.name].next_sample

    def count_draws(self) -> None:
        """Count what the step drew as used, because the step is applied."""
        for name, segment in self._pending.items():
            self._records[name] = feed_rules.with_draw(self._records.get(name), segment)
        self._pending.clear()

    def encode(self) -> dict[str, Any]:
        """Encode the records for the checkpoint's tree, without feeds from
        which nothing has been drawn.
        """
        return encode_records(self._records)

    def encode_settings(self) -> dict[str, Any]:
        return {name: codec.encode(made.settings) for name, made in self._made.items()}

    def _segment(self, made: Batches, step: int) -> Segment:
        record = self._records.get(made.name)
        if record is None:
            return self._first(made, step)
        segment = feed_rules.continue_from(record.last, made.settings, step)
        if segment is not record.last:
            self._note_edit(made, record.last, segment)
        return segment

    def _first(self, made: Batches, step: int) -> Segment:
        if not self._recorded:
            self._note(_unrecorded(made, self._applied))
            # Such a version took the samples of a step from (step - 1) x global_batch on.
            return feed_rules.begin(made.settings, step, (step - 1) * made.global_batch)
        left = sorted(set(self._records) - set(self._made))
        if left and made.name not in self._accepted:
            raise StateError(_unclaimed(made.name, left))
        if self._applied:
            self._note(f"feed {made.name} is new: step {step} begins it with its first sample")
        change = f"feed {', '.join(left)} is not continued" if left else ""
        return feed_rules.begin(made.settings, step, change=change)

    def _note_edit(self, made: Batches, last: Segment, segment: Segment) -> None:
        edits = feed_rules.list_exact_changes(last, made.settings)
        if segment.change:
            edits.append(
                f"{segment.change}: the order changes; training goes on at sample "
                f"{segment.sample} of the new one"
            )
        self._note(f"feed {made.name}, from step {segment.step} on: {'; '.join(edits)}")

    def _require_same_order(self, made: Batches, last: Segment) -> None:
        changes = feed_rules.list_order_changes(last.order, made.settings.order)
        if changes:
            raise StateError(_refusal(made.name, self._applied, changes))


def decode_settings(tree: Mapping[str, Any]) -> dict[str, Settings]:
    """The settings in a state tree. Raises `codec.DecodeError`, which names the field."""
    found = tree.get(SETTINGS_KEY, {})
    return {n: codec.decode(Settings, one, f"{SETTINGS_KEY}.{n}") for n, one in found.items()}


def _require_equal(made: Batches, theirs: Settings, *, drawn: bool) -> None:
    """`theirs`: with which the running ranks draw. A feed that they have not `drawn` from may serve
    `job.evaluate` only, so its fingerprint is not compared.
    """
    own = made.settings
    if not drawn:
        own, theirs = _without_fingerprint(own), _without_fingerprint(theirs)
    changes = feed_rules.list_order_changes(theirs.order, own.order)
    changes += feed_rules.list_exact_changes(theirs, own)
    if changes:
        raise StateError(
            f"job.batches, feed {made.name}: this rank differs from the running ranks: {'; '.join(changes)}. "
            "Give all pods the same data and the same script"
        )


def _without_fingerprint(settings: Settings) -> Settings:
    return replace(settings, order=replace(settings.order, fingerprint=None))


def _refusal(name: str, applied: int, changes: Collection[str]) -> str:
    return (
        f"job.batches, feed {name}: the run cannot continue exactly after step {applied}: "
        f"{', '.join(changes)}. Put it back as it was, or start another run (--run, checkpoint.run). To go on with "
        f'another order on purpose: job.batches(…, on_change="{CONTINUE}"). If a call of '
        'job.batches was added before this one, give that one a name: job.batches(…, name="…")'
    )


def _unclaimed(name: str, left: Collection[str]) -> str:
    return (
        f"job.batches, feed {name}: the checkpoint has no such feed, and no job.batches of the "
        f"script continues its feed {', '.join(left)}. If it is the same data, give it that name: "
        f"job.batches(…, name={min(left)!r}). To begin with its first sample on purpose: "
        f'job.batches(…, on_change="{CONTINUE}")'
    )


def _unrecorded(made: Batches, applied: int) -> str:
    return (
        f"feed {made.name}: the checkpoint of step {applied} is from a version that did not record "
        f"feeds. Everstep assumes global_batch={made.global_batch} and the same data and order "
        "from step 1 on; if that is wrong, samples are repeated or left out"
    )
