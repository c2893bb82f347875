"""Magics for IPython and Jupyter: what a cell or a statement takes, and its functions line by line."""
