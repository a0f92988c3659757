"""From what a run computes outside its iterations to the columns of the side tables."""
