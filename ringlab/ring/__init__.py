"""The full ring, one idea a file. README.md beside this file lists them in reading order."""
