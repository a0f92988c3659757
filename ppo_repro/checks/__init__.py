"""Experiments on this machine: do the promises hold, and where do sampler and trainer first differ?"""
