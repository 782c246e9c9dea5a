"""Implements the peers port over HTTP."""

from popgate.adapters.peers.http import HttpPeers

__all__ = ["HttpPeers"]
