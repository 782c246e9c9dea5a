"""All slips of `make mutate`."""

from mutants.adapters import ADAPTERS
from mutants.domain import DOMAIN
from mutants.engine import ENGINE
from mutants.services import SERVICES

SLIPS = (*DOMAIN, *ENGINE, *ADAPTERS, *SERVICES)
