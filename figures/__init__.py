"""One script a picture, and the pictures: `make figures` draws them all again."""

from pathlib import Path

FOLDER = Path(__file__).parent
