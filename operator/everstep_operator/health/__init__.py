"""Signals of nodes and GPUs, and the verdicts that follow from them.

`scrape` reads exporters, `parse` makes pages of their text, `signals` folds pages into what is
remembered of a node, `rules` and `verdicts` decide, `loop` runs it all and is what `handlers` starts:

    loop = HealthLoop(kube=…, world=…, settings=…, verdicts=…)     see `everstep_operator.health_seam`

To the receiver of the verdicts: a verdict says what is known of the whole node; ask
`verdict.state_of(namespace, pod)` for one pod, for a GPU that vanished makes only the pod that held
it *gone*. Call `loop.rank_died(node)` when a rank or a container dies: the node is then *suspect*
until a page sampled after that moment shows all its GPUs.
"""
