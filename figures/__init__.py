"""Every picture, and the scripts that draw them: `make figures` draws those again that pages show."""

from pathlib import Path

FOLDER = Path(__file__).parent
