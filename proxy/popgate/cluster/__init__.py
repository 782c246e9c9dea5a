"""Decides which queues this proxy owns. Each member computes the same plan, without a leader (decision 18)."""
