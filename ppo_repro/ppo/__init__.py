"""PPO's mathematics on tensors and numbers; only `update` knows models and optimizers."""
