"""The cluster: decides which queues this proxy owns; the members agree without a leader (design: section 6)."""
