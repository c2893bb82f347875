"""Which lines of chosen functions run when, while a step is recorded or measured."""
