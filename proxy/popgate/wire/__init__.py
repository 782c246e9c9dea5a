"""Implements the protocol between the proxies of a cluster: encoding, versions and authentication.

Owns the bytes and headers. ``adapters.peers`` and ``api.peers`` transport them. The engine interprets the messages.
"""
