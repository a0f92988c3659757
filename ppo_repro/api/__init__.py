"""Implement `import ppo_repro`: deterministic models in your own code, and runs from a notebook."""
