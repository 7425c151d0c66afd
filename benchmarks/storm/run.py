"""`make bench-storm`: how much training is left with a fault every few seconds; see README.md."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "recovery"))  # it uses bench-recovery's parts
    from everstep_storm.cli import main

    sys.exit(main())
