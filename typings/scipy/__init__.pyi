"""What pyright reads of scipy: the stubs beside this file."""
