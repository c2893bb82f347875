"""What ops do on the CPU."""
