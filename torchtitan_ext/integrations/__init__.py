"""Thin adapters to what trains: each its own module, imported by nothing here, over a package that may be absent."""
