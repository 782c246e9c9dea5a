"""Suggests the word that the user may have meant in place of an unknown one: commands, flags, values and names."""

import difflib
from collections.abc import Iterable, Mapping

CUTOFF = 0.65
"""Minimum similarity of a suggestion, from 0 to 1, as ``difflib`` measures it."""
SYNONYMS = {
    "add": ("create", "publish"),
    "browse": ("tail",),
    "change": ("set", "policy"),
    "consume": ("pop",),
    "dlq": ("dead-letters",),
    "get": ("list", "show", "stats"),
    "info": ("show", "stats"),
    "lock": ("locks",),
    "ls": ("list", "topics"),
    "monitor": ("top",),
    "nack": ("release",),
    "new": ("create", "set"),
    "nodes": ("cluster",),
    "produce": ("publish",),
    "push": ("publish",),
    "put": ("create", "publish", "set"),
    "queues": ("topics",),
    "receive": ("pop",),
    "remove": ("delete",),
    "retry": ("redrive",),
    "rm": ("delete",),
    "run": ("serve",),
    "send": ("publish",),
    "start": ("serve",),
    "status": ("stats",),
    "subscriptions": ("groups",),
    "update": ("policy", "set"),
    "watch": ("top",),
}
"""Words of other command lines, with popgate's words for them in the order of preference."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of the ``known`` words that the user most likely meant by ``word``, or None."""
    words = list(known)
    for synonym in SYNONYMS.get(word, ()):
        if synonym in words:
            return synonym
    if found := difflib.get_close_matches(word, words, n=1, cutoff=CUTOFF):
        return found[0]
    longer = [one for one in words if len(word) >= 3 and one.startswith(word)]
    return min(longer, key=len, default=None)


def closest_flag(flag: str, known: Mapping[str, str]) -> str | None:
    """Return the flag to suggest in place of ``flag``, or None. ``known`` has the suggestion for each flag. Dashes at
    the start and a value after an equals sign don't count."""
    bare = {one.lstrip("-"): suggestion for one, suggestion in known.items() if one.startswith("--")}
    found = closest(flag.partition("=")[0].lstrip("-").replace("_", "-"), bare)
    return None if found is None else bare[found]


def did_you_mean(found: str | None) -> str:
    """Return the end of an error message that suggests ``found``. It is empty for None."""
    return "" if found is None else f"; did you mean {found!r}?"
