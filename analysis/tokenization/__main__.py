"""What do tokenizer and unit do to KL? The command `python -m analysis.tokenization`."""

from analysis.tokenization.tables import main

main()
