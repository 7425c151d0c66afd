"""`make bench-recovery`: what a lost rank costs, compared with other systems; see README.md."""

import sys

from everstep_recovery.cli import main

if __name__ == "__main__":
    sys.exit(main())
