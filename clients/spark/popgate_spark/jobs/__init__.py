"""The jobs that read the journal: audit, balance, latency and advice."""
