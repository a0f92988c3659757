"""The layers of transformers models in exact numerics, as modules that run on any device."""
