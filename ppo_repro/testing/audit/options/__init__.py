"""Change one option of a model's architecture, because another stack may leave it out or compute it otherwise.

Nothing here knows a family: options are found in a model's configuration, its tensors and its code.
"""
