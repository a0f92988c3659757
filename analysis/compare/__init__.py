"""Are two runs, or two groups of seeds, the same?"""
