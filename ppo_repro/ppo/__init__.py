"""PPO's mathematics on tensors and numbers. Nothing here knows a configuration, a model or a file."""
