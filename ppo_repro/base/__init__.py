"""What every other folder stands on: errors, files, output, interrupts, clocks, random streams, processes."""
