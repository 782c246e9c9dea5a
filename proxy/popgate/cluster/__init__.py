"""The cluster: which queues this proxy owns, as all members agree without a leader (design: section 6)."""
