"""The peer protocol of the proxies of a cluster: encoding, versions and authentication.

Owns bytes and headers. ``adapters.peers`` and ``api.peers`` transport them; the engine gives them their meaning.
"""
