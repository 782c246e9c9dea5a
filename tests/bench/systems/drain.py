"""Runs the clients of one drain, in this process: python drain.py JOB, and prints the figures as JSON."""

import asyncio
import json
import sys
from importlib import import_module

from bench.systems.clients.client import Client
from bench.systems.metering import Job, Meter


def find_client(name: str) -> Client:
    """Return a client by the name of its module and of its constant in it. Raises: ModuleNotFoundError."""
    module, _, constant = name.partition(":")
    client = getattr(import_module(f"bench.systems.clients.{module}"), constant)
    assert isinstance(client, Client)
    return client


def main() -> None:
    job = Job.from_json(sys.argv[1])
    meter = Meter(job)
    asyncio.run(find_client(job.client).drain(job, meter))
    assert meter.result is not None
    print(json.dumps(meter.result.as_json()))


if __name__ == "__main__":
    main()
