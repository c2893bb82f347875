"""Memory line by line where functions really run: the decorator, and what measures a process between its lines."""
