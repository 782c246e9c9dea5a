"""Proxies of other releases than this one: the earlier one, frozen, and the next one, as it may come to be."""
