"""What ops do on a CUDA card."""
