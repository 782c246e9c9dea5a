"""Dead letters: lists, shows, purges and redrives them."""
