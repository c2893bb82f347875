"""`python -m memplan.cli`, for where the command is not on the path."""

from memplan.cli import main

main(prog_name="memplan")
