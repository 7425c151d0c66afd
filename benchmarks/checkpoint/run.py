"""`make bench-checkpoint`: what a save costs the step, compared with other libraries; see README.md."""

import sys

from everstep_checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
