"""`make bench-hang`: how often slow steps on a busy machine are taken for a hang; see README.md."""

import sys

from everstep_hang.cli import main

if __name__ == "__main__":
    sys.exit(main())
