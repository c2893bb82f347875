"""What a captured step reads beside tensors: the code that ran, what it can read, and whether that has changed."""
