"""What environment variables ask of kernels."""

from __future__ import annotations

import os

# an aid of the tests: AMX instructions are carried out by ordinary ones, slowly, with the same results
EMULATED_AMX = os.environ.get("PPO_REPRO_AMX") == "emulated"
