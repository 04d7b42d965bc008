"""The ranks of a group or mesh: what they tell each other, and which of them is lost when a collective fails."""
