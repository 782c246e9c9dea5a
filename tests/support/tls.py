"""A private certificate authority for the tests."""

import shutil
import subprocess
from pathlib import Path

from support.processes import ServerMissingError

DAYS = "2"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Issues certificates for servers on 127.0.0.1, and for clients. Raises: ServerMissingError."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            raise ServerMissingError("openssl is not installed")
        folder.mkdir(parents=True)
        self._folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority-key.pem"
        self._openssl(
            *("req", "-x509", *NEW_KEY, "-days", DAYS, "-subj", "/CN=authority of a test"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def certify(self, name: str) -> tuple[Path, Path]:
        """Create a new certificate for 127.0.0.1, and its key."""
        certificate, key, request = (self._folder / f"{name}{suffix}" for suffix in (".pem", "-key.pem", ".csr"))
        names = self._folder / f"{name}.names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        self._openssl(
            *("x509", "-req", "-in", str(request), "-days", DAYS, "-extfile", str(names), "-out", str(certificate)),
            *("-CA", str(self.certificate), "-CAkey", str(self._key), "-set_serial", str(len(name))),
        )
        return certificate, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
