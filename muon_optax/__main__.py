"""`python -m muon_optax COMMAND`."""

import sys

from muon_optax.cli import main

if __name__ == "__main__":
    sys.exit(main())
