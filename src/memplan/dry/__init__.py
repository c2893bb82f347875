"""The dry card: the CUDA build of torch, unmodified, runs on a machine without a GPU; kernels do nothing."""
