"""``python -m memplan``, where the command itself is not on the path."""

from memplan.cli import main

if __name__ == "__main__":
    main()
