"""Nodes: which are marked, by which `NodeQuarantine`, within which budget.

`plan` decides, `patches` builds what is sent, `apply` sends it.
One incident on one node is one `NodeQuarantine`.
"""
