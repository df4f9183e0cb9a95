"""`python -m electra` is the `electra` command."""

from .cli import main

if __name__ == "__main__":
    main()
