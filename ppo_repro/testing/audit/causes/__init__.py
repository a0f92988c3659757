"""Say what may be wrong on one side: a row of one table for each cause, with the numbers that it predicts."""
