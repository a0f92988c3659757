"""The layers of transformers models in exact numerics, as modules, on any device."""
