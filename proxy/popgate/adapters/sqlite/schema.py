"""Defines the tables of the embedded store: the tables of version 1, and the upgrades from each version to the next.

A new file runs through all upgrades like an old file, so that both end with the same tables. Released statements are
never changed.
"""

APPLICATION_ID = 0x706F7067
"""Marks the file as popgate's ("popg"), so that popgate never uses another program's database."""
SCHEMA_VERSION = 5

SCHEMA = (
    "CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), high_water REAL NOT NULL)",
    "INSERT INTO store VALUES (1, 0.0)",
    "CREATE TABLE topic (name TEXT PRIMARY KEY, spec TEXT NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE topic_group (
        topic TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, PRIMARY KEY (topic, name)
    ) WITHOUT ROWID
    """,
    # Queues in the lease store. Rows are never deleted, because the epoch of a claim must only increase.
    """
    CREATE TABLE lease_queue (
        queue_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE lease_mode (
        topic TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, PRIMARY KEY (topic, name)
    ) WITHOUT ROWID
    """,
    # state: the index in lease_records.STATES. From 4 on, the copy is settled.
    """
    CREATE TABLE lease (
        queue_id INTEGER NOT NULL, copy_id TEXT NOT NULL, state INTEGER NOT NULL, lease_id TEXT NOT NULL,
        visible_at REAL NOT NULL, delivery_count INTEGER NOT NULL, first_delivered_at REAL NOT NULL,
        changed_at REAL NOT NULL, epoch INTEGER NOT NULL, target TEXT, target_copy_id TEXT, reason TEXT NOT NULL,
        PRIMARY KEY (queue_id, copy_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX lease_settled ON lease (queue_id, changed_at) WHERE state >= 4",
    # copies: JSON [[queue_id, copy_id], ...] in the order in which they were granted.
    """
    CREATE TABLE attempt (
        topic TEXT NOT NULL, name TEXT NOT NULL, attempt_id TEXT NOT NULL, lease_id TEXT NOT NULL,
        ends_at REAL NOT NULL, copies TEXT NOT NULL, PRIMARY KEY (topic, name, attempt_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX attempt_end ON attempt (ends_at)",
    # Queues of the embedded broker. AUTOINCREMENT: a deleted queue's id is never reused, because its messages may
    # linger.
    """
    CREATE TABLE broker_queue (
        queue_id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, topic TEXT, queue_index INTEGER,
        stored INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE TABLE broker_garbage (queue_id INTEGER PRIMARY KEY)",
    # message_key: queue_id << 40 | position, so that one B-tree holds each queue's messages in order, bodies included.
    # once_in: the queue_id if a repeated publish of the same copy must be stored only once, otherwise NULL.
    """
    CREATE TABLE message (
        message_key INTEGER PRIMARY KEY, once_in INTEGER, copy_id TEXT NOT NULL, message_id TEXT NOT NULL,
        ordering_key TEXT, published_at REAL NOT NULL, headers BLOB, body BLOB NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX message_once ON message (once_in, copy_id) WHERE once_in IS NOT NULL",
)

UPGRADES = {
    2: (
        # visible_at: when a delayed message became visible, otherwise NULL. expires_at: when a ttl ends, otherwise
        # NULL.
        "ALTER TABLE message ADD COLUMN visible_at REAL",
        "ALTER TABLE message ADD COLUMN expires_at REAL",
        # Messages that are published but not visible before due_at (the store's clock). At due_at, a message moves to
        # the queues that the topic's groups have at that time.
        """
        CREATE TABLE delayed (
            delayed_id INTEGER PRIMARY KEY, due_at REAL NOT NULL, topic TEXT NOT NULL, queue_index INTEGER NOT NULL,
            copy_id TEXT NOT NULL, message_id TEXT NOT NULL, ordering_key TEXT, published_at REAL NOT NULL,
            visible_at REAL, expires_at REAL, headers BLOB, body BLOB NOT NULL
        )
        """,
        "CREATE INDEX delayed_due ON delayed (due_at, topic, queue_index)",
        # Publishes that carried a dedup_id. row_id increases with reserved_at, so the row that ends first comes first.
        # message_id: NULL if it equals the copy id.
        """
        CREATE TABLE dedup (
            row_id INTEGER PRIMARY KEY, topic TEXT NOT NULL, dedup_id TEXT NOT NULL, copy_id TEXT NOT NULL,
            message_id TEXT, queue_index INTEGER NOT NULL, reserved_at REAL NOT NULL,
            confirmed INTEGER NOT NULL DEFAULT 0
        )
        """,
        "CREATE UNIQUE INDEX dedup_key ON dedup (topic, dedup_id)",
        # Copies that the broker may hold twice: their settled records are kept.
        "CREATE TABLE repeated_copy (copy_id TEXT PRIMARY KEY, noted_at REAL NOT NULL) WITHOUT ROWID",
        # Streams of lease groups. Every epoch up to acked_through is acked, or about to be. The latest ack set acked
        # and lost.
        """
        CREATE TABLE lease_stream (
            stream_id INTEGER PRIMARY KEY, topic TEXT NOT NULL, name TEXT NOT NULL, stream TEXT NOT NULL,
            acked_through INTEGER NOT NULL DEFAULT -1, acked INTEGER NOT NULL DEFAULT 0,
            lost INTEGER NOT NULL DEFAULT 0, changed_at REAL NOT NULL, UNIQUE (topic, name, stream)
        )
        """,
        # state: the index in lease_group_rows._STATES. AUTOINCREMENT: a group's number is never reused.
        """
        CREATE TABLE lease_group (
            group_id INTEGER PRIMARY KEY AUTOINCREMENT, stream_id INTEGER NOT NULL, epoch INTEGER NOT NULL,
            state INTEGER NOT NULL, lease_id TEXT NOT NULL, builder TEXT NOT NULL, slices INTEGER NOT NULL,
            span INTEGER NOT NULL DEFAULT 0, member_count INTEGER NOT NULL DEFAULT 0,
            lost INTEGER NOT NULL DEFAULT 0, ends_at REAL NOT NULL, created_at REAL NOT NULL,
            held_since REAL NOT NULL, UNIQUE (stream_id, epoch)
        )
        """,
        """
        CREATE TABLE lease_group_member (
            group_id INTEGER NOT NULL, position INTEGER NOT NULL, queue_id INTEGER NOT NULL, copy_id TEXT NOT NULL,
            delivery_count INTEGER NOT NULL, first_delivered_at REAL NOT NULL, lost INTEGER NOT NULL,
            PRIMARY KEY (group_id, position)
        ) WITHOUT ROWID
        """,
    ),
    3: (
        # leased_at: when the present lease was granted. For a lease that was extended before this version, the time is
        # known only if it is the message's first lease. Otherwise this is the latest possible time. Settled records
        # don't need it.
        "ALTER TABLE lease ADD COLUMN leased_at REAL NOT NULL DEFAULT 0.0",
        """
        UPDATE lease SET leased_at = CASE delivery_count WHEN 1 THEN first_delivered_at ELSE changed_at END
        WHERE state < 4
        """,
        # A group that is being formed may be granted its own members again after their leases have expired.
        "CREATE INDEX lease_group_copy ON lease_group_member (group_id, queue_id, copy_id)",
    ),
    4: (
        """
        CREATE TABLE lock_definition (
            name TEXT PRIMARY KEY, kind TEXT NOT NULL, slots INTEGER NOT NULL, enabled INTEGER NOT NULL,
            by_use INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        # All fencing tokens below next_token may have been handed out.
        "CREATE TABLE lock_fence (one INTEGER PRIMARY KEY CHECK (one = 1), next_token INTEGER NOT NULL)",
        "INSERT INTO lock_fence VALUES (1, 1)",
    ),
    5: (
        # assignment: JSON, see assignment_json.
        """
        CREATE TABLE pull_assignment (
            topic TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, assignment TEXT NOT NULL,
            PRIMARY KEY (topic, name)
        ) WITHOUT ROWID
        """,
    ),
}
"""For each version, the statements that upgrade the previous version to it."""
