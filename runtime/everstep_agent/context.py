"""What every part of an agent receives."""

from collections.abc import Callable
from dataclasses import dataclass

from everstep_agent import logline
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.identity import Identity
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage.retrying import Retrying
from everstep_contract import env


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    settings: env.AgentEnv
    me: Identity
    store: Retrying
    """The run's folder in the object store."""
    run_log: RunLog
    """As read by this process. A later term as coordinator reads only what is new."""
    memory: MemoryTier
    line: logline.Log
    disk: FolderTier | None = None
    """The tier on a disk of the node; None: the job names no disk."""
    dropped: Callable[[], int] = lambda: 0
    """Lines of this process's output that were dropped because nobody reads it."""
