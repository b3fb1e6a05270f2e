"""Debian packages as a source of texts: fetched with `apt-get download` and unpacked into a folder, never installed."""

from __future__ import annotations

import subprocess
from pathlib import Path


def fetch(package: str, folder: Path) -> Path:
    """Download and unpack a package, unless that was done before.

    Args:
        package: Name of the package.
        folder: Where the `.deb` file and the unpacked folder go.

    Returns:
        The folder that holds the package's files as below `/`.

    Raises:
        subprocess.CalledProcessError: If the package cannot be fetched or unpacked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / package
    if unpacked.is_dir():
        return unpacked
    if not list(folder.glob(f"{package}_*.deb")):
        _download(package, folder)
    partial = folder / f"{package}.partial"
    subprocess.run(["dpkg-deb", "-x", str(_archive(package, folder)), str(partial)], check=True)
    partial.rename(unpacked)
    return unpacked


def version(package: str, folder: Path) -> str:
    """The version of a package that `fetch` has downloaded."""
    command = ["dpkg-deb", "-f", str(_archive(package, folder)), "Version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _archive(package: str, folder: Path) -> Path:
    return max(folder.glob(f"{package}_*.deb"))


def _download(package: str, folder: Path) -> None:
    command = ["apt-get", "-qq", "download", package]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode != 0:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(command, cwd=folder, check=True)
