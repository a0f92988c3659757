"""DPO as a kind of run."""
