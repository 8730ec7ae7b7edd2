"""``python -m bei``."""

from bei.cli.main import main

if __name__ == "__main__":
    main()
