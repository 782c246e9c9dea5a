"""Every state of a small group: the production decisions of the balance, explored exhaustively. `make explore`."""
