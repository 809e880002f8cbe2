"""``python -m rmsnorm``."""

from rmsnorm.cli import main

if __name__ == "__main__":
    main()
