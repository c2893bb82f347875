"""memplan inside of other tools: scripts as they are, pytest, trainers, notebooks. Everything here is imported lazily."""
