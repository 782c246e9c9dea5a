"""Dead letters: listing, reading and redriving them."""
