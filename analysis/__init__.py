"""Analyses of recorded runs. They read records only and compute every quantity a second time; README.md is the way in."""
