"""The command `python -m ppo_repro.analysis.mismatch`: do two log-probs agree?"""

import sys

from ppo_repro.analysis.mismatch.tables import main

sys.exit(main())
