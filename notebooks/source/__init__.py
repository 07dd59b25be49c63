"""The chapters, in reading order, and what their exercises and processes need."""
