"""The prover's own proof: locks that are broken on purpose, and a cluster whose nodes may be killed."""
