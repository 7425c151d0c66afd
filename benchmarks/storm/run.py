"""`make bench-storm`: how much training is left under a fault every few seconds; see README.md."""

import sys

from everstep_storm.cli import main

if __name__ == "__main__":
    sys.exit(main())
