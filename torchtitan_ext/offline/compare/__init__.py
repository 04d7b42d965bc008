"""What two checkpoints differ in, and fingerprints of their tensors."""
