"""Joint graph and budget -> Plan: what of the forward pass is kept for the backward pass, and what is made again."""
