"""The exporter DaemonSet's pod on a node.

The node itself serves the exporter, so the pod starts no process.
"""

from datetime import datetime

from everstep_lab.node import objects
from everstep_lab.node.objects import Object
from everstep_lab.seam import NodeSpec


class ExporterPod:
    """Implements `link.Reported`. The pod is Running and Ready as long as its object exists.

    Its status does not depend on what the exporter answers.
    """

    over = False

    def __init__(self, spec: NodeSpec, document: Object, since: datetime) -> None:
        self._spec, self._since, self.document = spec, since, document
        metadata = document["metadata"]
        self.uid: str = metadata["uid"]
        self.name: str = metadata["name"]
        self.namespace: str = metadata["namespace"]

    def build_status(self, now: datetime) -> Object:
        return objects.build_exporter_status(self._spec, self.document, self._since)

    def update(self, document: Object) -> None:
        self.document = document
