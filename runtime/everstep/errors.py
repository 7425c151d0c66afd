"""The errors that a training script can get. Every message names the cause and the fix."""


class EverstepError(RuntimeError):
    """The base of all errors that this package raises."""


class Misuse(EverstepError):
    """The script uses the API in a way that would train something other than what it says."""


class NotUnderAgent(EverstepError):
    """`everstep.run` was called in a process that no Everstep agent started."""


class StateError(EverstepError):
    """Something tracked cannot be stored, or a checkpoint does not fit what the script tracks."""
