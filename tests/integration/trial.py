"""The names that the tests of this folder use; everything is `everstep_demo.trial`'s."""

from everstep_demo.trial import NAMESPACE, URI, Trial, build_job

__all__ = ["NAMESPACE", "URI", "Trial", "build_job"]
