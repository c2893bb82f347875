"""Joint graph and budget -> Plan: which forward values are saved for the backward pass, and which are recomputed."""
