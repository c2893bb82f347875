"""What others do to make a step fit."""
