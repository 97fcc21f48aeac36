"""`python -m tinsmith.cli` is `tinsmith`."""

from tinsmith.cli.main import main

if __name__ == "__main__":
    main()
