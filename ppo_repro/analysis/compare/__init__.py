"""Are two runs the same?"""
