"""``python -m bei``."""

from bei.cli import main

if __name__ == "__main__":
    main()
