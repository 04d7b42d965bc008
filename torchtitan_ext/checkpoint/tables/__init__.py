"""What each rank tells the coordinator of its keys, and what all ranks say together."""
