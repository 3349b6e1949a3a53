"""Certificates for a test: an authority, and one key pair that servers and clients show."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Certificates:
    """PEM files."""

    authority: Path
    certificate: Path
    key: Path

    def config_lines(self) -> list[str]:
        """For a server's file: TLS for clients, replicas and the bus; no client has to show one."""
        return [
            f"tls-cert-file {self.certificate}", f"tls-key-file {self.key}",
            f"tls-ca-cert-file {self.authority}", "tls-replication yes", "tls-auth-clients no",
        ]  # fmt: skip

    def server_options(self) -> list[str]:
        """The same as options, and for the bus of a cluster."""
        lines = [*self.config_lines(), "tls-cluster yes"]
        return [part for line in lines for part in (f"--{line.split()[0]}", line.split()[1])]

    def client_options(self) -> dict[str, Any]:
        """For redis-py."""
        return {"ssl": True, "ssl_ca_certs": str(self.authority)}


def make(directory: Path) -> Certificates:
    """Write an authority and a certificate of 127.0.0.1 into a directory."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    directory.mkdir(parents=True, exist_ok=True)
    ca, key = directory / "ca.pem", directory / "ca.key"
    _openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=lisa test",
        "-addext", "basicConstraints=critical,CA:TRUE", "-keyout", key, "-out", ca,
    )  # fmt: skip
    made = Certificates(ca, directory / "server.pem", directory / "server.key")
    request, names = directory / "server.csr", directory / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n", encoding="utf-8")
    _openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", made.key,
        "-out", request,
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", request, "-CA", ca, "-CAkey", key, "-CAcreateserial", "-days", "2",
        "-extfile", names, "-out", made.certificate,
    )  # fmt: skip
    return made


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
