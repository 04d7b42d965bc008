"""Checkpoints that are bound to the world that saved them, as boxes of keys in files: one reader per kind."""
