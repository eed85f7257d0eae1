"""``python -m mtcheckpoint``."""

import sys

from mtcheckpoint.cli import main

sys.exit(main())
