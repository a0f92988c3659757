"""What `import ppo_repro` offers: deterministic models in your own code, and runs from a notebook."""
