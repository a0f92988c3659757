# %% [markdown]
# # Are two runs the same?
# The runs' folders: PPO_RUN and PPO_OTHER_RUN, or the lines below. For a second run use `--set numerics.mode=native`.

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
# Four nested questions: bits, log-probs of the same tokens, answers, outcome. The last one needs seeds:
# `analysis.compare.seeds.compare_groups` on the tables of a grid.

# %%
compare_runs(RUN, OTHER, np.random.default_rng(0))

# %%
print(first_difference(RUN, OTHER))

# %% [markdown]
# How far apart are the log-probs, iteration by iteration?

# %%
responses = paired_responses(RUN, OTHER)
error_growth(responses)

# %% [markdown]
# How long do responses stay the same? Survival of all, and the first half of the iterations against the second.

# %%
kaplan_meier(responses["compared"].to_numpy(), responses["diverged"].to_numpy())

# %%
early = responses["iteration"] < responses["iteration"].median()
times, flags = responses["compared"].to_numpy(), responses["diverged"].to_numpy()
print("log-rank statistic and p-value", log_rank(times[early], flags[early], times[~early], flags[~early]))
