"""Kernels: the inner loops of the reducers, in torch for CPUs and in Triton for CUDA, with the same bits.

Only `lowrank` differs in the last ones: its long sums are taken in another order.
"""
