"""Defines the tables of the embedded store: the tables of schema version 1, and the upgrades to later versions.

A new file gets the tables of version 1 and then all upgrades, so that a new file and an upgraded file have the same
tables. The statements of a released version are never changed.
"""

APPLICATION_ID = 0x706F7067
"""SQLite's application id ("popg") in files of popgate. It prevents popgate from using the database of another
program."""
SCHEMA_VERSION = 6

SCHEMA = (
    "CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), high_water REAL NOT NULL)",
    "INSERT INTO store VALUES (1, 0.0)",
    "CREATE TABLE topic (name TEXT PRIMARY KEY, spec TEXT NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE topic_group (
        topic TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, PRIMARY KEY (topic, name)
    ) WITHOUT ROWID
    """,
    # Queues in the lease store. Rows are never deleted, because the epoch of a queue must never decrease.
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
    # Queues of the embedded broker. With AUTOINCREMENT, the id of a deleted queue is never reused, because messages of
    # the deleted queue may still be stored.
    """
    CREATE TABLE broker_queue (
        queue_id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, topic TEXT, queue_index INTEGER,
        stored INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE TABLE broker_garbage (queue_id INTEGER PRIMARY KEY)",
    # message_key: queue_id << 40 | position, so that one B-tree contains the messages of each queue in order, with
    # their bodies. once_in: the queue_id if a repeated publish of the same copy must not be stored again, otherwise
    # NULL.
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
        # visible_at: the time at which a delayed message became visible, or NULL if it was not delayed. expires_at: the
        # time at which the ttl of the message ends, or NULL without a ttl.
        "ALTER TABLE message ADD COLUMN visible_at REAL",
        "ALTER TABLE message ADD COLUMN expires_at REAL",
        # Messages that are published but not visible before due_at, a time of the store's clock. At due_at, a message
        # is moved to the queues that the groups of the topic have at that time.
        """
        CREATE TABLE delayed (
            delayed_id INTEGER PRIMARY KEY, due_at REAL NOT NULL, topic TEXT NOT NULL, queue_index INTEGER NOT NULL,
            copy_id TEXT NOT NULL, message_id TEXT NOT NULL, ordering_key TEXT, published_at REAL NOT NULL,
            visible_at REAL, expires_at REAL, headers BLOB, body BLOB NOT NULL
        )
        """,
        "CREATE INDEX delayed_due ON delayed (due_at, topic, queue_index)",
        # Publishes with a dedup_id. row_id increases with reserved_at, so the row whose dedup window ends first has the
        # lowest row_id. message_id: NULL if it equals the copy id.
        """
        CREATE TABLE dedup (
            row_id INTEGER PRIMARY KEY, topic TEXT NOT NULL, dedup_id TEXT NOT NULL, copy_id TEXT NOT NULL,
            message_id TEXT, queue_index INTEGER NOT NULL, reserved_at REAL NOT NULL,
            confirmed INTEGER NOT NULL DEFAULT 0
        )
        """,
        "CREATE UNIQUE INDEX dedup_key ON dedup (topic, dedup_id)",
        # Copies that the broker may contain twice. Their settled lease records are kept longer.
        "CREATE TABLE repeated_copy (copy_id TEXT PRIMARY KEY, noted_at REAL NOT NULL) WITHOUT ROWID",
        # Streams of lease groups. Every epoch up to acked_through is acked, or is being acked. acked and lost count the
        # messages of the latest ack.
        """
        CREATE TABLE lease_stream (
            stream_id INTEGER PRIMARY KEY, topic TEXT NOT NULL, name TEXT NOT NULL, stream TEXT NOT NULL,
            acked_through INTEGER NOT NULL DEFAULT -1, acked INTEGER NOT NULL DEFAULT 0,
            lost INTEGER NOT NULL DEFAULT 0, changed_at REAL NOT NULL, UNIQUE (topic, name, stream)
        )
        """,
        # state: the index in lease_group_rows._STATES. With AUTOINCREMENT, the id of a group is never reused.
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
        # leased_at: the time at which the present lease was granted. For a lease that was extended before the upgrade,
        # this time is exact only if it is the first lease of the message. Otherwise the upgrade sets the latest
        # possible time. Settled records don't need leased_at.
        "ALTER TABLE lease ADD COLUMN leased_at REAL NOT NULL DEFAULT 0.0",
        """
        UPDATE lease SET leased_at = CASE delivery_count WHEN 1 THEN first_delivered_at ELSE changed_at END
        WHERE state < 4
        """,
        # Finds a member by its copy: if the lease of a member expires while its group is being formed, the group may be
        # granted the same message a second time.
        "CREATE INDEX lease_group_copy ON lease_group_member (group_id, queue_id, copy_id)",
    ),
    4: (
        """
        CREATE TABLE lock_definition (
            name TEXT PRIMARY KEY, kind TEXT NOT NULL, slots INTEGER NOT NULL, enabled INTEGER NOT NULL,
            by_use INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        # Fencing tokens below next_token may have been issued. Tokens from next_token on have not been issued.
        "CREATE TABLE lock_fence (one INTEGER PRIMARY KEY CHECK (one = 1), next_token INTEGER NOT NULL)",
        "INSERT INTO lock_fence VALUES (1, 1)",
    ),
    5: (
        # assignment: JSON in the format of popgate.adapters.assignment_json.
        """
        CREATE TABLE pull_assignment (
            topic TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, assignment TEXT NOT NULL,
            PRIMARY KEY (topic, name)
        ) WITHOUT ROWID
        """,
    ),
    6: ("ALTER TABLE lock_definition ADD COLUMN deleted INTEGER NOT NULL DEFAULT 0",),
}
"""For each schema version after 1, the statements that upgrade a file from the previous version."""
