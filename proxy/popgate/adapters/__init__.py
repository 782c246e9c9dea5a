"""Adapters: implementations of the ports on real brokers and stores. Only bootstrap chooses among them."""
