# %% [markdown]
# # Are two runs the same?
# Folders: PPO_RUN and PPO_OTHER_RUN, or the lines below. A good second run: `--set numerics.mode=native`.

# %%
import os

import numpy as np

from analysis.compare.bitwise import first_difference
from analysis.compare.paired import error_growth, paired_responses
from analysis.compare.verdicts import compare_runs
from analysis.stats.survival import kaplan_meier, log_rank

RUN = os.environ.get("PPO_RUN", "runs/quickstart/seed0")
OTHER = os.environ.get("PPO_OTHER_RUN", "runs/native/quickstart/seed0")

# %% [markdown]
# Four nested questions: bits, log-probs of the same tokens, what is answered, what is learnt. The last needs seeds:
# `analysis.compare.seeds.compare_groups` on the tables of a grid.

# %%
compare_runs(RUN, OTHER, np.random.default_rng(0))

# %%
print(first_difference(RUN, OTHER))

# %% [markdown]
# How far do log-probs part, iteration by iteration?

# %%
responses = paired_responses(RUN, OTHER)
error_growth(responses)

# %% [markdown]
# How long are responses the same? Survival of all, and the first half of the iterations against the second.

# %%
kaplan_meier(responses["compared"].to_numpy(), responses["diverged"].to_numpy())

# %%
early = responses["iteration"] < responses["iteration"].median()
times, flags = responses["compared"].to_numpy(), responses["diverged"].to_numpy()
print("log-rank statistic and p-value", log_rank(times[early], flags[early], times[~early], flags[~early]))
