"""The names from `everstep_demo.trial` that this folder's tests use."""

from everstep_demo.trial import NAMESPACE, URI, Trial, build_job

__all__ = ["NAMESPACE", "URI", "Trial", "build_job"]
