"""The settings currently in effect: the pod's environment, overridden by the operator's later
edits. Pure.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from everstep_contract import env, levels


def apply_wanted(made: env.AgentEnv, wanted: levels.Wanted) -> env.AgentEnv:
    """`made`: the pod's environment. What `wanted` does not set stays as it is."""
    edited: dict[str, Any] = {
        field.name: getattr(wanted.settings, field.name)
        for field in dataclasses.fields(wanted.settings)
    }
    edited["save_every_steps"] = wanted.save_every_steps
    edited["save_every_seconds"] = wanted.save_every_seconds
    return replace(made, **{name: value for name, value in edited.items() if value is not None})
