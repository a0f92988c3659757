"""What `import ppo_repro` offers: exact models in one's own code, and runs from a notebook."""
