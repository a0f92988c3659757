"""Optimizers whose step gives the same bits however the work is split up."""
