"""Defines the rules of popgate as values and pure functions, without I/O and clocks. Only new ids are random."""
