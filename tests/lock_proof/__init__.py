"""Tests of the prover itself: deliberately broken locks, and a cluster whose nodes may be killed."""
