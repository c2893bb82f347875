"""The process that a script runs in: what holds its files, its connections and its processes. Standard library only."""
