"""The prover: does an implementation of locks keep what locks promise, whatever happens to who holds them?

Theory of operation. A **crew** of worker processes acquires, verifies, writes under and releases one lock, each at
random after a seed of its own, and prints every invocation before it and every completion after it, with the times of
the machine's one monotonic clock: what a killed worker was at stays an open invocation. A **nursery**, which has
imported what they need, forks them. Each worker talks to the broker through a **relay** in its own process, which
counts round trips and channels, and cuts the connection when told. The **nemesis** disturbs: it kills and stops
workers, cuts their connections, changes the number of slots, and kills nodes of the broker, on a seeded schedule. The
**record** puts together what everybody printed and did; after each round all let go, what is then held and can be had
is counted, and ``domain.lock_history`` checks the whole of it.

    run --> crew --> nursery, worker processes --> relay --> broker <-- nodes (commands, or a test harness)
     |       ^                                                             |
     |       +------------------ nemesis ----------------------------------+
     +--> record --> lock_history.check --> report

The protected resource is the parent, which takes a worker's write or refuses it by its token (``locks.fence``).
"""
