"""The lab's pod on each node of the kind lab: the device plugin, the exporter and the faults of its GPUs.

It runs in its own container (`python -m everstep_lab.kind.labnode`); the host's lab does not
import it.
"""
