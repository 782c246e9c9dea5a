"""A client that was made before a fork works in both processes, and the child does not end what its parent holds."""

import subprocess
import sys

from support.proxy import ProxyProcess

WAIT_SECONDS = 30

CONNECTIONS = """
import os, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from popgate_client import Client

class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def setup(self):
        super().setup()
        connections.append(self)
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass

connections = []
server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Client(f"http://127.0.0.1:{server.server_port}")
client.info()
child = os.fork()
client.info()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(connections))
"""

LOCK = """
import os, sys
from popgate_client import Client

client = Client(sys.argv[1])
with client.lock("forked", ttl_seconds=60) as lock:
    child = os.fork()
    if child == 0:
        assert lock.is_lost
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lock.verify()
    print(len(client.get_lock("forked")["holders"]))
"""


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout.strip()


def test_a_forked_child_uses_connections_of_its_own() -> None:
    assert output_of(CONNECTIONS) == "2"


def test_a_forked_child_does_not_release_its_parents_lock(shared_proxy: ProxyProcess) -> None:
    assert output_of(LOCK, shared_proxy.url) == "1"
