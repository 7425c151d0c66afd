"""Reasons why a pod cannot run here, with the kubelet's messages where it has them."""


class NotSimulatedError(Exception):
    """The pod uses something that the lab does not simulate; never retried."""


class ConfigError(Exception):
    """A ConfigMap, Secret or key does not exist (yet); retried."""


class ImageError(Exception):
    """No such image; retried, because the file of images may be edited."""
