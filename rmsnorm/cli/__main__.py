"""``python -m rmsnorm.cli``."""

from rmsnorm.cli import app

if __name__ == "__main__":
    app()
