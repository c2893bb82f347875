"""The memory of a step without its trap: recorded again, or simulated with other lifetimes of its storages."""
