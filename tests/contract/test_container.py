"""The health check of the image, run against real proxies outside of a container."""

import subprocess
from pathlib import Path

from support.certificates import MemoryAuthority, write
from support.proxy import ProxyProcess, python_program

HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "healthcheck.py"


def health(port: int) -> int:
    """Return the exit status of the health check, in the environment that the image gives it."""
    command = python_program(str(HEALTHCHECK))
    return subprocess.run(command, env={"POPGATE_PORT": str(port)}, timeout=10, check=False).returncode


def test_a_proxy_without_tls_is_healthy_unless_it_hangs(tmp_path: Path) -> None:
    with ProxyProcess(tmp_path) as proxy:
        found = [health(proxy.port)]
        proxy.pause()
        found.append(health(proxy.port))
        proxy.resume()
    assert found == [0, 1]


def test_a_proxy_with_tls_is_healthy_until_it_is_gone(tmp_path: Path) -> None:
    certificate, key = write(tmp_path, *MemoryAuthority().issue())
    proxy = ProxyProcess(tmp_path, "--tls-certificate-file", str(certificate), "--tls-key-file", str(key))
    proxy.client.base_url = proxy.url.replace("http:", "https:")  # it does not verify
    with proxy:
        assert health(proxy.port) == 0
    assert health(proxy.port) == 1
