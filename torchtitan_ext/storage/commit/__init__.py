"""How a save takes its place in a directory: lock, stage, rename, leftovers; how a reader keeps to one checkpoint."""
