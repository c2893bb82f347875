"""Write a training step as C for a small device: the planned step, its memory at fixed addresses, its proof."""
