"""Proves who a caller is: API keys, client certificates and tokens; and records what callers change."""
