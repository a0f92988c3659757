"""What do tokenizer and unit do to KL? The command `python -m analysis.tokenization`."""

import sys

from analysis.tokenization.tables import main

sys.exit(main())
