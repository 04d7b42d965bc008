"""The ranks of a group or mesh: collectives of plain values, and which rank is lost when one fails."""
