"""Plan, its decisions and its words."""
