"""Topics and groups: what exists, and which subscriptions this proxy serves."""
