"""The documents and protocols that two processes of Everstep must share. Standard library only.

Read in this order: `levels` (operator and job), `log` (the run's history), `manifest` (a
checkpoint), `position` and `wire` (agent and worker), `report` (the exit report).
"""

PROTOCOL = 1
"""Version of the documents that cross a process boundary; documents one minor version older are
accepted.
"""
