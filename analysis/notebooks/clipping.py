# %% [markdown]
# # What did the clip do?
# The run's folder: PPO_RUN, or the line below.

# %%
import os

from analysis.clipping.tables import clip_tables, overview

RUN = os.environ.get("PPO_RUN", "runs/quickstart/seed0")
tables = clip_tables(RUN)
print("\n".join(overview(tables, early_stop_kl=None)))

# %% [markdown]
# Step by step: shares of tokens outside the band and of removed gradients, largest ratio, KL(anchor || new).

# %%
steps = tables.clip_step[tables.clip_step["subset"] == "all"]
steps[["iteration", "epoch", "minibatch", "band_out", "grad_zero", "clip_floor", "r_max", "kl_k3"]]

# %% [markdown]
# Does clipping bound the ratio? Overshoot by epoch, and tokens that return to the band.

# %%
tables.overshoot_survival

# %%
tables.band_transitions

# %% [markdown]
# Which tokens are clipped: by probability and sign of the advantage, and by id.

# %%
tables.clip_bucket

# %%
tables.clip_vocab

# %% [markdown]
# The same with another clip range, without running again.

# %%
narrow = clip_tables(RUN, band=(0.1, 0.1)).clip_step
narrow[narrow["subset"] == "all"][["iteration", "epoch", "minibatch", "band_out", "grad_zero"]]
