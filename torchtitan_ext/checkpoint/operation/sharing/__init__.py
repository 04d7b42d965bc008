"""Reads that ranks share: what several of them want is read by one, and sent to the others."""
