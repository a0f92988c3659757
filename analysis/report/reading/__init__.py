"""What the pages of a report are about: facts, verdicts and rows, read from the records."""
