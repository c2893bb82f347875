"""The joint graph: values, bytes, what is known without running."""
