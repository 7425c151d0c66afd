"""What two processes of Everstep must both believe. Standard library only.

Read in this order: `levels` (operator and job), `log` (the run's history), `manifest` (a checkpoint),
`position` and `wire` (agent and worker), `report` (what is left when all else is gone).
"""

PROTOCOL = 1
"""Version of the documents that cross a process boundary; one minor older is understood."""
