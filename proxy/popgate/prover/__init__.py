"""Checks that a lock implementation fulfils its guarantees while faults are injected into the clients that hold locks.

Theory of operation. A **crew** of worker processes acquires, verifies and releases one lock, and writes to a resource
that the lock protects. Each worker acts at random with its own seed. It prints a line before each call and another one
after the call, with the time of the machine's monotonic clock, which all processes share. The history does not show an
outcome for the last call of a killed worker. A **fork server** has imported the modules that the workers need, and
forks the workers. Each worker talks to the broker through a **relay** in its own process, which counts round trips and
channels, and cuts the connection on demand. The **nemesis** injects faults: it kills and stops workers, cuts their
connections, changes the number of slots, and kills nodes of the broker, on a seeded schedule. The **record** combines
the output of all workers with the injected faults. After each round all workers release the lock. The prover then
counts the slots that are still reported as held, and the slots that can be acquired, and ``domain.lock_history`` checks
the whole history.

    run --> crew --> fork server, worker processes --> relay --> broker <-- nodes (commands, or a test harness)
     |       ^                                                             |
     |       +------------------ nemesis ----------------------------------+
     +--> record --> lock_history.check --> report

The parent process of the workers acts as the protected resource: it compares fencing tokens to accept or refuse a
worker's write (``locks.fence``).
"""
