"""The metadata of a checkpoint: its file, as columns, and as mappings that are filled when asked for."""
