"""`make bench-scale`: what the operator costs with many jobs and nodes; see README.md."""

import sys

from everstep_scale.cli import main

if __name__ == "__main__":
    sys.exit(main())
