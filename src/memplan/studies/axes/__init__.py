"""Axes that studies vary: batch, sizes, precision, arguments, attributes of layers."""
