"""`python -m tests.crash`."""

import sys

from tests.crash.driver import main

sys.exit(main())
