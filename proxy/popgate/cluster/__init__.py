"""Decides which queues this proxy owns. The members of the cluster agree without a leader (decision 18)."""
