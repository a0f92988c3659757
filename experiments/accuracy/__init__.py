"""How accurate the exact numerics and stock transformers are, beside the model in float64."""
