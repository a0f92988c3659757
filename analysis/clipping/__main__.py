"""The command `python -m analysis.clipping`: what did the clip do?"""

import sys

from analysis.clipping.tables import main

sys.exit(main())
