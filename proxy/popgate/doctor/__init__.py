"""The rules of ``popgate doctor``: they turn observed facts into findings. Pure; adapters observe, bootstrap connects
them.

``facts`` defines what can be observed, ``findings`` what can be reported, and ``examination`` applies every rule.
"""
