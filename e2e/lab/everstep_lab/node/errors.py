"""Reasons why a pod cannot run on a simulated node. Messages are the kubelet's if it has one."""


class NotSimulatedError(Exception):
    """The pod uses something that the lab does not simulate. Never retried."""


class ConfigError(Exception):
    """A ConfigMap, Secret or key does not exist yet. Retried."""


class ImageError(Exception):
    """The image does not exist. Retried, because the user may edit the file that lists images."""
