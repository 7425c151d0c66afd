"""`make bench-steady`: what an undisturbed step costs compared with stock DDP; see README.md."""

import sys

from everstep_steady.cli import main

if __name__ == "__main__":
    sys.exit(main())
