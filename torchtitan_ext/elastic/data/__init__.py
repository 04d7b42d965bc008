"""Data loaders that go on with any number of ranks: map-style data, streams in virtual shards, packed tokens."""
