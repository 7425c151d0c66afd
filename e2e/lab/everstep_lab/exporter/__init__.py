"""A dcgm-exporter without GPUs.

It has the labels, latched values, count windows and missing series of the real one. `gpu` holds the
state of one GPU, `csv` lists the metrics, `render` makes the page, `server` serves it.
"""
