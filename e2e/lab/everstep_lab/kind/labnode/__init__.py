"""What runs on each node of the kind lab: the device plugin, the exporter and the faults of its GPUs.

It runs in a container of its own (`python -m everstep_lab.kind.labnode`); the host's lab does not
import it.
"""
