"""Do two log-probs agree? The command `python -m analysis.mismatch`."""

import sys

from analysis.mismatch.tables import main

sys.exit(main())
