"""Proxies of other releases: the earlier one, frozen, and a possible next one."""
