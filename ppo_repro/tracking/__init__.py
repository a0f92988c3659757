"""A copy of records in MLflow."""
