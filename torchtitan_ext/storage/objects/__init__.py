"""Checkpoints in object stores: read by ranges, written in parts, committed by one conditional put of ``.metadata``."""
