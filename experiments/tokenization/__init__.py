"""Does the tokenizer matter? Grid files of studies, and an exact table of what cannot depend on it."""
