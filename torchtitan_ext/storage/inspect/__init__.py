"""What any checkpoint holds and whether it is whole, without loading it."""
