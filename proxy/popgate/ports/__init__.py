"""What the engine needs of the world, as Protocols.

Adapters fulfil them without inheriting; contract tests hold them to it.
"""
