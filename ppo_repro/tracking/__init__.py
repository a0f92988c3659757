"""Copies of recorded runs and grids in MLflow, W&B and TensorBoard, and for a function of the user."""
