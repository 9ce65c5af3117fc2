"""Gradient compression: selection, error feedback, gain, wire format and the search for a factor.

Everything here is pure: torch tensors and numbers in, tensors and numbers out. Nothing knows of
Horovod, MPI, a clock or other ranks.
"""
