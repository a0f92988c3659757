"""Are two runs the same? The command `python -m analysis.compare`."""

import sys

from analysis.compare.verdicts import main

sys.exit(main())
