"""PPO's mathematics on tensors and numbers; only `objective` and `update` know configuration and models."""
