"""Implements the protocol between the proxies of a cluster: its encoding, versions and authentication.

This package converts messages to bytes and defines the HTTP headers. ``adapters.peers`` sends messages over HTTP, and
``api.peers`` receives them. The engine handles the received messages.
"""
