"""The cluster: decides which queues this proxy owns; the members agree without a leader (decision 18)."""
