"""The package's own rank files: DCP's records with checksums, written and read by ``csrc/storage``."""
