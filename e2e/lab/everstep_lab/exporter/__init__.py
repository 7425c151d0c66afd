"""A dcgm-exporter without GPUs: same labels, latches, windows and silences as the real one.

`gpu` holds the state of one GPU, `csv` names the metrics, `render` makes the page, `server`
serves it.
"""
