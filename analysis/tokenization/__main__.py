"""The command `python -m analysis.tokenization`: what do tokenizer and unit do to KL?"""

import sys

from analysis.tokenization.tables import main

sys.exit(main())
