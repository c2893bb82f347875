"""A training script as it is: run unchanged in a process of its own, its steps recorded, its writes held back."""
