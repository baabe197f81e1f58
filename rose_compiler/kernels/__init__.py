"""Fast forms of loops over tensors: Triton kernels for CUDA devices, numpy for the CPU."""
