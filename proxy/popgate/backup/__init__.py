"""Takes backups of the data folder while the proxy runs, and describes what a backup contains.

``manifest`` defines the description of a backup, and ``archive`` its form on the wire. ``hosted`` takes a backup in a
running proxy. The package does not restore: ``popgate restore`` does, without a proxy (docs/backup.md).
"""
