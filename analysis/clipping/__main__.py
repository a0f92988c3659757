"""The command `python -m ppo_repro.analysis.clipping`: what did the clip do?"""

import sys

from ppo_repro.analysis.clipping.tables import main

sys.exit(main())
