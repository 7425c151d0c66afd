"""`make bench-steady`: what an undisturbed step costs compared with stock DDP; see README.md."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(
        str(Path(__file__).parents[1] / "recovery")
    )  # it trains bench-recovery's layers
    from everstep_steady.cli import main

    sys.exit(main())
