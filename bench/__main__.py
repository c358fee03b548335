"""`python -m bench`: measures, prints a table, writes a JSON file."""

from bench.cli import main

if __name__ == "__main__":
    main()
