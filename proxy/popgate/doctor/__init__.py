"""The rules of ``popgate doctor``: observed facts in, findings out. Pure; adapters observe, bootstrap connects them.

``facts`` has what can be observed, ``findings`` what is said about it, ``examination`` applies every rule.
"""
