"""Certificates for tests: an authority, and one key pair for servers and clients."""

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
        """Options for redis-py."""
        return {"ssl": True, "ssl_ca_certs": str(self.authority)}


def make(directory: Path) -> Certificates:
    """Write an authority and a certificate for 127.0.0.1 into a directory."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    directory.mkdir(parents=True, exist_ok=True)
    ca, key = directory / "ca.pem", directory / "ca.key"
    _openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=lisa test",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign",
        "-keyout",
        key,
        "-out",
        ca,
    )
    made = Certificates(ca, directory / "server.pem", directory / "server.key")
    request, names = directory / "server.csr", directory / "names"
    names.write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n",
        encoding="utf-8",
    )
    _openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-keyout",
        made.key,
        "-out",
        request,
    )
    _openssl(
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        ca,
        "-CAkey",
        key,
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        names,
        "-out",
        made.certificate,
    )
    return made


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
