"""What ops take on the CPU that no fake tensor tells: temporaries inside kernels, and results of other sizes."""
