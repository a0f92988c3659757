# %% [markdown]
# # Do sampler and trainer agree?
# `make run` makes a run in two to three minutes; name its folder in PPO_RUN or here.

# %%
import os

from analysis.diagnosis.diagnose import diagnose_chunks
from analysis.mismatch.metrics import wide
from analysis.mismatch.tables import measure, summary, tables
from analysis.pairs.run_evidence import run_evidence
from analysis.pairs.runs import run_pairs

RUN = os.environ.get("PPO_RUN", "runs/quickstart/seed0")

# %% [markdown]
# The whole run, beside the values of an exact one.

# %%
summary(RUN)

# %% [markdown]
# By iteration: does the mismatch grow as the policy moves?

# %%
by_iteration = tables(measure(run_pairs(RUN)))
wide(by_iteration.update)

# %% [markdown]
# Where is it: by probability, entropy, position and length, in the first iteration?

# %%
by_iteration.bucket[by_iteration.bucket["iteration"] == 0]

# %% [markdown]
# What would truncated or masked importance sampling cut?

# %%
by_iteration.correction

# %% [markdown]
# The cause.

# %%
diagnosis = diagnose_chunks(run_evidence(RUN))
print(diagnosis.verdict, diagnosis.tier, diagnosis.advice, sep="\n")
