"""The prover: checks that a lock implementation keeps its guarantees while its holders suffer faults.

Theory of operation. A **crew** of worker processes acquires, verifies and releases one lock, and writes to a resource
that the lock protects. Each worker acts at random with its own seed. It prints every call before the call starts and
after it completes, with the time of the machine's monotonic clock, which all processes share. The last call of a killed
worker stays open. A **fork server** has imported the modules that the workers need, and forks the workers. Each worker
talks to the broker through a **relay** in its own process, which counts round trips and channels, and cuts the
connection on demand. The **nemesis** injects faults: it kills and stops workers, cuts their connections, changes the
number of slots, and kills nodes of the broker, on a seeded schedule. The **record** combines the output of all workers
with the injected faults. After each round all workers release the lock, the prover counts the slots that are still held
and those that can be acquired, and ``domain.lock_history`` checks the whole history.

    run --> crew --> fork server, worker processes --> relay --> broker <-- nodes (commands, or a test harness)
     |       ^                                                             |
     |       +------------------ nemesis ----------------------------------+
     +--> record --> lock_history.check --> report

The parent process acts as the protected resource: it accepts or refuses a worker's write by the fencing token
(``locks.fence``).
"""
