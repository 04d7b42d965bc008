"""What a transform does on the way from rank to rank: of which keys it makes others, and which it quantises."""
