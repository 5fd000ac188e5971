"""Nsight Compute over the kernels of an attention call: counters, the measured ceilings of the GPU, roofline."""
