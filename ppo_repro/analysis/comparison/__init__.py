"""Are two runs the same? Tests of four levels, with a verdict on each finding."""
