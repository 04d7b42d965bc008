"""The directory of a run: its steps, and which of them stay."""
