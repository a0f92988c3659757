"""The command `python -m ppo_repro.analysis.tokenization`: what do tokenizer and unit do to KL?"""

import sys

from ppo_repro.analysis.tokenization.tables import main

sys.exit(main())
