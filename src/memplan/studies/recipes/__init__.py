"""Training steps by the names of a model and of a recipe, as scripts of the real libraries."""
