"""Adapters: how the ports are fulfilled with real brokers and stores. Chosen in bootstrap, nowhere else."""
