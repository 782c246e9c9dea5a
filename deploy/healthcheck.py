"""Exit with 0 if the proxy in this container answers GET /healthz, by https or by http.

The certificate is not verified: it names the service, and not 127.0.0.1. The request contains no credential.
"""

import http.client
import os
import ssl
import sys

HOST = "127.0.0.1"
PORT_TEXT = os.environ.get("POPGATE_PORT", "")
PORT = int(PORT_TEXT) if PORT_TEXT.isdecimal() else 8080  # a link to a service has this name, too: tcp://...
SECONDS_MAX = 2.0
"""Maximum seconds for each attempt. Docker's limit for both is in the Dockerfile."""


def answers(connection: http.client.HTTPConnection) -> bool:
    """Return whether the proxy answers on this connection, and its answer is a success."""
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    https = http.client.HTTPSConnection(HOST, PORT, timeout=SECONDS_MAX, context=unverified)
    return 0 if answers(https) or answers(http.client.HTTPConnection(HOST, PORT, timeout=SECONDS_MAX)) else 1


if __name__ == "__main__":
    sys.exit(main())
