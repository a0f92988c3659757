"""Real models and texts that packages carry, made into folders that a run can use."""
