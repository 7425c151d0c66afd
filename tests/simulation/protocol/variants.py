"""Variants of the protocol, each with the invariant that it breaks. They show what each rule is
for.
"""

from dataclasses import dataclass

from simulation.protocol import step_first_variants
from simulation.protocol.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    rules: Rules
    faults: tuple[str, ...]
    breaks: str
    """Part of the message of the invariant that it must break."""
    delays: int = 0
    spares: int = 0
    walks: int = 0
    """If not 0: at most this many random walks instead of a search, because the story needs too
    many faults for a search.
    """


VARIANTS = {
    "append without create-only": Variant(
        rules=Rules(create_only=False),
        faults=("duel",),
        breaks="the log was written over",
        delays=1,
    ),
    "entries of the log are deleted": Variant(
        rules=Rules(steps=1, entries_stay=False),
        faults=("pause", "worker"),
        breaks="the log was written over",
        delays=1,
    ),
    "a claim leaves out whom nobody declared dead": Variant(
        rules=Rules(steps=1, proof_needed=False), faults=("link",), breaks="leaves out"
    ),
    "newcomers step before their claim": Variant(
        rules=Rules(steps=1, claim_first=False), faults=("duel",), breaks="in different gangs"
    ),
    "a worker that was forked again stands for the old one": Variant(
        rules=Rules(lives_count=False), faults=("worker",), breaks="behind where it stood"
    ),
    "an agent that was started again stands for the old one": Variant(
        rules=Rules(steps=1, incarnations_count=False),
        faults=("agent",),
        breaks="nothing can happen",
        delays=1,
    ),
    "a newcomer coordinates without the newest entry": Variant(
        rules=Rules(steps=1, know_before_ending=False, catch_up=False),
        faults=("agent",),
        breaks="which is not committed",
        delays=1,
    ),
    "who coordinates stops the job before it has heard who holds what": Variant(
        rules=Rules(steps=1, ask_first=False),
        faults=("stop", "pause"),
        breaks="stopped though",
    ),
    "who coordinates stops the job before those have answered who have just come over": Variant(
        rules=Rules(steps=1, hear_out=False),
        faults=("stop", "leave", "duel", "link", "pause"),
        breaks="stopped though",
        walks=5000,
    ),
    "state is continued off the chain": Variant(
        rules=Rules(state_on_chain=False), faults=("worker",), breaks="are in one epoch", delays=1
    ),
    "a claim leaves out whom nobody declared dead, in place": Variant(
        rules=Rules(in_place=True, silence_is_death=True),
        faults=("link",),
        breaks="leaves out",
        delays=1,
    ),
    "survivors go on before their claim": Variant(
        rules=Rules(in_place=True, claim_first=False),
        faults=("duel", "worker"),
        breaks="in different gangs",
        delays=1,
    ),
    "survivors step first without proof of the others' deaths": Variant(
        rules=Rules(
            in_place=True, step_first=step_first_variants.without_proof, silence_is_death=True
        ),
        faults=("link",),
        breaks="in different gangs",
        delays=1,
    ),
    "a pod may be left out after any claim": Variant(
        rules=Rules(steps=1, in_place=True, yields_expire=False),
        faults=("duel", "yield", "link"),
        breaks="leaves out",
        delays=1,
    ),
    "a pod that may be left out is, though it speaks": Variant(
        rules=Rules(steps=1, in_place=True, yields_are_of_silent=False),
        faults=("yield", "link"),
        breaks="resumes at",
        delays=1,
    ),
    "newcomers step first, in place": Variant(
        rules=Rules(in_place=True, newcomers=True, newcomers_claim_first=False),
        faults=("worker", "pause"),
        breaks="leaves out",
    ),
    "an epoch is committed before it is claimed": Variant(
        rules=Rules(in_place=True, commit_claimed=False),
        faults=("worker",),
        breaks="nobody has claimed",
        delays=1,
    ),
    "an epoch ends the workers that it names": Variant(
        rules=Rules(steps=1, in_place=True, named_stay=False),
        faults=("worker", "pause"),
        breaks="which is not committed",
    ),
    "a claim in the log ends the workers that it names": Variant(
        rules=Rules(steps=1, in_place=True, log_spares_named=False),
        faults=("gone", "pause"),
        breaks="which is not committed",
    ),
    "survivors tell how far they are and step on": Variant(
        rules=Rules(in_place=True, hold_first=False),
        faults=("gone",),
        breaks="which is not committed",
        delays=1,
    ),
    "survivors go on without joining the next epoch": Variant(
        rules=Rules(in_place=True, join_first=False), faults=("gone", "link"), breaks="no end"
    ),
    "survivors go on behind a commit": Variant(
        rules=Rules(in_place=True, extend_commits=False),
        faults=("agent", "link"),
        breaks="does not go on from",
    ),
    "survivors go on without a look at what others have committed": Variant(
        rules=Rules(in_place=True, know_commits=False), faults=("leave",), breaks="no end", delays=2
    ),
    "newcomers are claimed before they hold the state": Variant(
        rules=Rules(in_place=True, newcomers=True, take_first=False),
        faults=("worker",),
        breaks="are in one epoch",
    ),
    "members take the next step while newcomers take their state": Variant(
        rules=Rules(in_place=True, newcomers=True, sums_wait=False),
        faults=("worker",),
        breaks="are in one epoch",
    ),
    "a member that leaves ends before all hold for its replacement": Variant(
        rules=Rules(in_place=True, newcomers=True, leave_held=False),
        faults=("leave",),
        breaks="which is not committed",
        delays=1,
        spares=1,
    ),
    "newcomers are claimed before the members have joined the next epoch": Variant(
        rules=Rules(in_place=True, newcomers=True, join_first=False),
        faults=("pause",),
        breaks="resumes at",
        delays=1,
    ),
    "a staged save is continued off the chain": Variant(
        rules=Rules(saves_on_chain=False),
        faults=("worker", "worker"),
        breaks="does not go on from",
        delays=2,
    ),
}
