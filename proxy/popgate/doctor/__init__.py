"""The rules of ``popgate doctor``, which derive findings from observed facts.

The rules are pure functions. Adapters observe the facts, and ``bootstrap`` connects both. ``facts`` defines the facts
that can be observed, ``findings`` defines the findings that can be reported, and ``examination`` applies every rule.
"""
