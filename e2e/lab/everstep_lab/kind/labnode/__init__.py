"""The lab's own pod on each node of the kind lab: device plugin, exporter and faults of the GPUs.

It runs in its own container (`python -m everstep_lab.kind.labnode`). The lab on the host does not
import it.
"""
