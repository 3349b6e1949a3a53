"""Certificates for tests: an authority, and one key pair for servers and clients."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Certificates:
    authority: Path
    certificate: Path
    key: Path

    def config_lines(self) -> list[str]:
        """Lines for a server's file: TLS without client certificates, also for the bus."""
        return [
            f"tls-cert-file {self.certificate}",
            f"tls-key-file {self.key}",
            f"tls-ca-cert-file {self.authority}",
            "tls-replication yes",
            "tls-auth-clients no",
        ]

    def server_options(self) -> list[str]:
        """The same as options, with TLS for the cluster bus."""
        lines = [*self.config_lines(), "tls-cluster yes"]
        return [part for line in lines for part in (f"--{line.split()[0]}", line.split()[1])]

    def client_options(self) -> dict[str, Any]:
        return {"ssl": True, "ssl_ca_certs": str(self.authority)}


def make(directory: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    directory.mkdir(parents=True, exist_ok=True)
    ca, key = directory / "ca.pem", directory / "ca.key"
    made = Certificates(ca, directory / "server.pem", directory / "server.key")
    request, names = directory / "server.csr", directory / "names"
    names.write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n",
        encoding="utf-8",
    )
    own = "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign"
    files = ("-subj", "/CN=lisa test", "-keyout", key, "-out", ca)
    _openssl(f"req -x509 -newkey rsa:2048 -nodes -days 2 {own}", *files)
    of_key = ("-subj", "/CN=localhost", "-keyout", made.key)
    _openssl("req -newkey rsa:2048 -nodes", *of_key, "-out", request)
    signed = ("-in", request, "-CA", ca, "-CAkey", key, "-extfile", names)
    _openssl("x509 -req -CAcreateserial -days 2", *signed, "-out", made.certificate)
    return made


def _openssl(command: str, *more: str | Path) -> None:
    subprocess.run(["openssl", *command.split(), *more], check=True, capture_output=True)
