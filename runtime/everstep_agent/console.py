"""The program `everstep`. While it imports the command line, which takes a tenth of a second, Ctrl-C ends the
process at once: a KeyboardInterrupt in an import would show a traceback.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    shows = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else the shell has set it to be ignored
    if shows:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from everstep_agent import cli

    if shows:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
