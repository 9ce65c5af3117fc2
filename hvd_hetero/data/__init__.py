"""Which samples each rank trains on: the epoch's order, its global batches and each rank's slice.

``partition`` is pure. ``schedule`` says which plan applies to which draw, and lets an agreement
between ranks change that safely. ``sampler`` draws a rank's indices. ``loader`` is the torch
``DataLoader`` that also tells, with every batch it hands out, how many samples that batch has on
this rank and over all ranks.
"""
