"""Contains the adapters, which implement the ports on real brokers and stores. Only ``bootstrap`` chooses adapters."""
