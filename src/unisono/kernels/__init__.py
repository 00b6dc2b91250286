"""Kernels: the inner loops of the reducers, in torch for CPUs and in Triton for CUDA, with the same bits."""
