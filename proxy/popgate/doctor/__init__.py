"""The rules of ``popgate doctor``, which derive findings from observed facts.

The rules are pure functions. ``adapters.doctor`` observes the facts, and ``bootstrap.doctor`` passes these facts to the
rules. ``facts`` defines the facts that can be observed, ``findings`` defines the findings that can be reported, and
``examination`` applies every rule.
"""
