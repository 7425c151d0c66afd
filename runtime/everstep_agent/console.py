"""The program `everstep`. While it imports the command line, which takes a tenth of a second, Ctrl-C ends the
process at once: a KeyboardInterrupt in an import would show a traceback.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    # A shell may have set the signal to be ignored. Then it stays so.
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from everstep_agent import cli

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
