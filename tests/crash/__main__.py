"""`python -m tests.crash`."""

import sys

from tests.crash.seeds import main

if __name__ == "__main__":
    sys.exit(main())
