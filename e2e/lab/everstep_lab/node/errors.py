"""Why a pod cannot run here, in the kubelet's words where it has some."""


class NotSimulatedError(Exception):
    """The pod asks for something that the lab does not simulate; trying again does not help."""


class ConfigError(Exception):
    """A ConfigMap, Secret or key that is not there (yet); tried again."""


class ImageError(Exception):
    """No such image; tried again, because the file of images may be edited."""
