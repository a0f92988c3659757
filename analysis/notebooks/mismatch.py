# %% [markdown]
# # Do sampler and trainer agree?
# `make run` makes a run in two to three minutes; name its folder in PPO_RUN or here.

# %%
import os

from analysis.diagnosis.diagnose import diagnose_chunks
from analysis.mismatch import tables as mismatch
from analysis.mismatch.metrics import wide
from analysis.pairs import runs

RUN = os.environ.get("PPO_RUN", "runs/quickstart/seed0")

# %% [markdown]
# The whole run, beside what an exact one has.

# %%
mismatch.summary(RUN)

# %% [markdown]
# By iteration: does it grow as the policy moves?

# %%
found = mismatch.tables(mismatch.measure(runs.run_pairs(RUN)))
wide(found.update)

# %% [markdown]
# Where it is: by probability, entropy, position and length of the first iteration.

# %%
found.bucket[found.bucket["iteration"] == 0]

# %% [markdown]
# What truncated or masked importance sampling would cut.

# %%
found.correction

# %% [markdown]
# The cause.

# %%
diagnosis = diagnose_chunks(runs.run_pairs(RUN))
print(diagnosis.verdict, diagnosis.tier, diagnosis.advice, sep="\n")
