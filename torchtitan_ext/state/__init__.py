"""State dicts and the values in them: nested and flat forms, digests, values read back without running code."""
