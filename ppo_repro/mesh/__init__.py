"""The processes of a run as a mesh: who holds which part of the models, and who computes which sequences."""
