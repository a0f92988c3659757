"""Analyses of recorded runs: they read records only and compute every quantity a second time. Start with README.md."""
