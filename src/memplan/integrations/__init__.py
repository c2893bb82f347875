"""memplan inside of other tools: scripts as they are, pytest, trainers, notebooks. All of it is imported lazily."""
