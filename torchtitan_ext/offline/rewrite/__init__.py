"""Checkpoints written anew: for another mesh, or in another format."""
