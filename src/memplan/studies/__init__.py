"""Many steps: swept over an axis, as large as fits, side by side, quantized."""
