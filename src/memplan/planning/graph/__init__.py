"""The joint graph: values, bytes, and what is known of ops without running them."""
