"""DPO on the responses of a recorded run."""
