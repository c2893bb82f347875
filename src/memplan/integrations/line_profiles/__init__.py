"""`memplan.profile`: memory of decorated functions line by line, measured while they run or predicted."""
