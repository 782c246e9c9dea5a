"""popgate: a pop-mode consumption proxy for RabbitMQ.

This package is the proxy. The thin client lives in ``popgate_client`` and needs nothing from here.
"""

__version__ = "0.1.0"
