"""memplan within other tools: unmodified scripts, pytest, trainers, notebooks. All of it is imported lazily."""
