"""The names that this folder's tests use, all from `everstep_demo.trial`."""

from everstep_demo.trial import NAMESPACE, URI, Trial, build_job

__all__ = ["NAMESPACE", "URI", "Trial", "build_job"]
