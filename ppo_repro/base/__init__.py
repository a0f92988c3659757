"""Modules that every other folder uses: errors, files, output, interrupts, clocks, random streams, processes."""
