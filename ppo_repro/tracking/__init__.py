"""Copy recorded runs and grids to MLflow, W&B, TensorBoard, or a function of the user."""
