"""Rewrite a captured step to the operations that the C kernels compute."""
