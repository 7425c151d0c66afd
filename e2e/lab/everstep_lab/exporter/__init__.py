"""A dcgm-exporter without GPUs.

It reproduces the labels, latched values, count windows and missing series of the real one. `gpu`
holds the state of one GPU, `csv` lists the metrics, `render` renders the page, `server` serves it.
"""
