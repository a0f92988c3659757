"""What did the clip do? The command `python -m analysis.clipping`."""

import sys

from analysis.clipping.tables import main

sys.exit(main())
