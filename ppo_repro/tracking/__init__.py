"""Copies of recorded runs and grids in MLflow and TensorBoard."""
