"""The prover: checks that a lock implementation keeps its guarantees while its holders suffer faults.

Theory of operation. A **crew** of worker processes acquires, verifies, writes under and releases one lock. Each worker
acts at random with its own seed, and prints every call before it starts and after it completes, with the times of the
machine's one monotonic clock; a killed worker's last call stays open. A **fork server**, which has imported what the
workers need, forks them. Each worker talks to the broker through a **relay** in its own process, which counts round
trips and channels, and cuts the connection on demand. The **nemesis** injects faults: it kills and stops workers, cuts
their connections, changes the number of slots, and kills nodes of the broker, on a seeded schedule. The **record**
combines all output and faults. After each round all workers release the lock, the prover counts the slots that are
still held and those that can be acquired, and ``domain.lock_history`` checks the whole history.

    run --> crew --> fork server, worker processes --> relay --> broker <-- nodes (commands, or a test harness)
     |       ^                                                             |
     |       +------------------ nemesis ----------------------------------+
     +--> record --> lock_history.check --> report

The protected resource is the parent, which accepts or refuses a worker's write by its token (``locks.fence``).
"""
