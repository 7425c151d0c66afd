"""Nodes: which are marked, by which `NodeQuarantine`, within which budget.

`observed` and `memory` are a pass's input, `plan` (or `observing`) decides, `marks` and
`statuses` build what is written, `apply` writes it, `passes` connects them. One incident on one
node is one `NodeQuarantine`.
"""
