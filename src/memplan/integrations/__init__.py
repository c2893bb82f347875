"""memplan inside of other tools: scripts as they are, pytest, trainers, notebooks; all imported lazily."""
