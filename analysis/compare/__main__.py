"""The command `python -m ppo_repro.analysis.compare`: are two runs the same?"""

import sys

from ppo_repro.analysis.compare.verdicts import main

sys.exit(main())
