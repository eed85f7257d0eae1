"""Where a share can lie: this node's volume, a peer's volume, a backup. One contract for all.

A place gives whole small files to read, and a TensorStore key-value spec for the arrays. It tells
"not there" (None) from "cannot be read" (`TierUnreadableError`), always.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from mtcheckpoint.errors import ShareError, TierUnreadableError

__all__ = [
    "SMALL_FILE_BYTES",
    "LocalPlace",
    "PeerPlace",
    "Place",
    "Tier",
    "check_small",
    "farthest",
    "open_regular",
    "read_small_file",
]

# What `Place.read` takes at most: what a share tells of itself has a few MB at most.
SMALL_FILE_BYTES = 256 << 20

Tier = Literal["local", "peer", "backup"]
_ORDER: tuple[Tier, ...] = ("local", "peer", "backup")


def farthest(tiers: list[Tier]) -> Tier:
    """The tier farthest from this node among `tiers`."""
    return max(tiers, key=_ORDER.index)


def check_small(size_bytes: int, file: str, place: str) -> None:
    """Refuses what is too large to be one of the small files of a share.

    Raises:
        ShareError: it is.
    """
    if size_bytes > SMALL_FILE_BYTES:
        raise ShareError(
            f"{place}/{file} is too large: no small file of a share has more than"
            f" {SMALL_FILE_BYTES:,} bytes",
            place=place,
        )


def open_regular(path: Path) -> int:
    """Opens a regular file to read, without waiting for anything; returns its descriptor.

    Raises:
        OSError: it is not there, or cannot be opened.
        ShareError: it is a folder, a pipe or the like.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ShareError(f"{path} is not a file", place=str(path.parent))
    return descriptor


def read_small_file(path: Path, *, limit_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """A whole regular file, without waiting for anything and without reading beyond a limit.

    Raises:
        OSError: it is not there, or cannot be read.
        ShareError: it is a folder, a pipe or the like, or larger than the limit.
    """
    descriptor = open_regular(path)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit_bytes:
        raise ShareError(
            f"{path} is too large: expected {limit_bytes:,} bytes at most", place=str(path.parent)
        )
    return content


class Place(Protocol):
    """One share, wherever it lies."""

    @property
    def tier(self) -> Tier:
        """How far away it is."""

    @property
    def name(self) -> str:
        """For people: a path or URL, never with a token."""

    def read(self, file: str) -> bytes | None:
        """A whole small file of the share; None when the share has no such file.

        Raises:
            ShareError: it has more than `SMALL_FILE_BYTES`, or is no file.
            TierUnreadableError: the place could not be read.
        """

    def size(self, file: str) -> int | None:
        """Bytes of a file of the share; None when the share has no such file.

        Raises:
            TierUnreadableError: the place could not be read.
        """

    def kvstore(self, folder: str) -> dict[str, Any]:
        """TensorStore's spec of a folder of the share. May hold a token: never log it."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPlace:
    """A directory that this process can open."""

    path: Path
    tier: Tier = "local"

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, file: str) -> bytes | None:
        try:
            return read_small_file(self.path / file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TierUnreadableError(
                f"cannot read {self.path / file}: {error}", place=self.name
            ) from error

    def size(self, file: str) -> int | None:
        try:
            return (self.path / file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TierUnreadableError(
                f"cannot look at {self.path / file}: {error}", place=self.name
            ) from error

    def kvstore(self, folder: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.path / PurePosixPath(folder)}/"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirection for an error: it would carry the token to somebody else."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


# Peers are reached directly: a proxy would see the token.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerPlace:
    """A share in another node's volume, served by `peers.ShareServer`."""

    url: str
    token: str = dataclasses.field(repr=False)
    timeout_secs: float = 60.0

    @property
    def tier(self) -> Tier:
        return "peer"

    @property
    def name(self) -> str:
        return self.url

    def read(self, file: str) -> bytes | None:
        answer = self._ask("GET", file)
        return None if answer is None else answer[1]

    def size(self, file: str) -> int | None:
        answer = self._ask("HEAD", file)
        return None if answer is None else answer[0]

    def _ask(self, method: str, file: str) -> tuple[int, bytes] | None:
        """The length and content of a file; None when there is no such file."""
        request = urllib.request.Request(
            f"{self.url}/{urllib.parse.quote(file)}",
            headers={"Authorization": self._bearer()},
            method=method,
        )
        try:
            with _DIRECTLY.open(request, timeout=self.timeout_secs) as answer:
                size_bytes = int(answer.headers["Content-Length"])
                if method == "HEAD":
                    return size_bytes, b""
                check_small(size_bytes, file, self.name)
                return size_bytes, bytes(answer.read(size_bytes))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise TierUnreadableError(
                    f"peer {self.url} answered {error.code} for {file}", place=self.name
                ) from error
        except (OSError, TimeoutError) as error:
            raise TierUnreadableError(
                f"peer {self.url} cannot be reached: {error}", place=self.name
            ) from error

    def kvstore(self, folder: str) -> dict[str, Any]:
        split = urllib.parse.urlsplit(self.url)
        return {
            "driver": "http",
            "base_url": f"{split.scheme}://{split.netloc}",
            "path": f"{split.path}/{folder}/",
            "headers": [f"Authorization: {self._bearer()}"],
        }

    def _bearer(self) -> str:
        return f"Bearer {self.token}"
