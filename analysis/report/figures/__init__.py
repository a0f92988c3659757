"""The figures of a report and the counts they show: learning curves, mismatch, clipping, text."""
