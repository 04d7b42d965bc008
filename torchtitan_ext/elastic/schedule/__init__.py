"""LR schedulers that go on at the same step, or at the same number of samples."""
