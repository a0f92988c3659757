"""The command `python -m analysis.mismatch`: do two log-probs agree?"""

import sys

from analysis.mismatch.tables import main

sys.exit(main())
