"""Many steps: sweeps over what a step is made of, the largest that fits, two beside each other."""
