"""Signals of nodes and GPUs, and the resulting verdicts.

`exporters` and `scrape` read pages, `parse` turns their text into values, `signals` folds them
into a node's memory by the rules in `rules`, `decide` and `verdicts` decide, `examiner` and
`publisher` keep the results, `loop` runs all of it and is started by `replica` (see
`everstep_operator.health_seam`).

For the receiver of verdicts: a verdict covers the whole node. For one pod use
`verdict.state_of(namespace, pod)`, because a GPU that vanished makes only the pod that held it
*gone*. Call `loop.rank_died(node)` when a rank or a container dies: the node is then *suspect*
until a page sampled after that moment shows all its GPUs.
"""
