"""The command `python -m ppo_repro.analysis.tokenization`: how do tokenizer and unit change KL?"""

import sys

from ppo_repro.analysis.tokenization.tables import main

sys.exit(main())
