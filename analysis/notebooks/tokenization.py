# %% [markdown]
# # KL by token, word and response
# The run's folder: PPO_RUN, or the line below.

# %%
import os

from analysis.tokenization.tables import iteration_tables, run_summary

RUN = os.environ.get("PPO_RUN", "runs/quickstart/seed0")

# %% [markdown]
# White space belongs to the word after it ("leading") or before it; standard errors over responses or prompts.

# %%
tables = iteration_tables(RUN, 0, boundary="leading", cluster="prompt")
tables.tok_summary

# %% [markdown]
# Words and responses of the first iteration.

# %%
tables.tok_word

# %%
tables.tok_seq

# %% [markdown]
# Numbers: how they are cut into tokens.

# %%
print(tables.mixed_numbers, "numbers left out")
tables.digit_table

# %% [markdown]
# Over the run.

# %%
run_summary(RUN, boundary="leading", cluster="prompt", iterations=None)
