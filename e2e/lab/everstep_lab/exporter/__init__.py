"""A dcgm-exporter without GPUs: same labels, latched values, count windows and missing series as the real one.

`gpu` holds the state of one GPU, `csv` lists the metrics, `render` makes the page, `server`
serves it.
"""
