"""What the proxies of a cluster say to each other: how it is written, in which version, and how they show who they are.

Owns bytes and headers. How they travel is ``adapters.peers``' and ``api.peers``' affair, what they mean the engine's.
"""
