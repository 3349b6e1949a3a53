"""Paths and URLs from users: absolute ones to use, and ones to show; the formats of files."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def absolute(where: str) -> str:
    """Make a relative path absolute; absolute paths and URLs are returned unchanged.

    Spark's JVM and workers may have another working directory, so they need absolute paths.
    """
    if not where or where.startswith("/") or _SCHEME.match(where):
        return where
    return f"{os.getcwd()}/{where}"  # noqa: PTH109  `Path` would remove a trailing slash


def shown(url: str) -> str:
    """The path of a file that Spark names by URL."""
    return unquote(url.removeprefix("file:").replace("///", "/", 1)) if url[:5] == "file:" else url


LOCAL_FILES = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Options of Spark's readers. The default file system, with checksums, rejects colons in names."""

_PATTERN = re.compile(r"([][{}*?\\])")


def literal(path: str) -> str:
    """A path for Spark's readers, which take a path for a pattern."""
    return _PATTERN.sub(r"\\\1", path)


_HIDDEN = ("_", ".")


def readable(source: str, endings: tuple[str, ...]) -> str:
    """The path under which Spark reads `source`, with LOCAL_FILES.

    A path that exists is not a pattern; others may be, as in `orders-*.csv`. Raises ConfigError for
    files with these endings that Spark would ignore: those whose names begin with _ or a dot.
    """
    local = re.sub("^file:(//)?(?=/)", "", source)
    if not os.path.exists(local):  # noqa: PTH110 - not every source is a path
        return absolute(source)
    for file in _files(local):
        name = os.path.basename(file)  # noqa: PTH119
        if file != local and not name.lower().endswith(endings):
            continue
        if name.startswith(_HIDDEN):
            raise ConfigError(
                f"{file}: Spark ignores files whose names begin with _ or a dot; rename the file"
            )
    return literal(os.path.abspath(local))  # noqa: PTH100 - keeps links


def _files(path: str) -> Iterator[str]:
    """The path itself; or the files below it."""
    if not os.path.isdir(path):  # noqa: PTH112
        yield path
    for folder, within, names in os.walk(path):
        within[:] = [name for name in within if not name.startswith(_HIDDEN)]
        yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118


def split_path(where: str) -> tuple[str, list[str]]:
    """The file system of a path or URL, and the names in its path."""
    found = re.match(r"(?:[A-Za-z][A-Za-z0-9+.-]*:(?://[^/]*)?)?", where)
    store = found[0] if found else ""
    path = posixpath.normpath(f"/{where.removeprefix(store)}").strip("/")
    return store, path.split("/") if path else []


def root_of(pattern: str) -> str:
    """The folder above all files of a pattern; a path without wildcards as it is, unescaped."""
    found = re.match(r"(?:\\.|[^][{}*?\\])*", pattern)
    start = found[0] if found else ""
    root = start if start == pattern else start.rpartition("/")[0]
    return re.sub(r"\\(.)", r"\1", root)


def partitions(
    source: str, path: str, files: Collection[str], base: str | None = None
) -> dict[str, Column]:
    """The partitions of files, by their names: the texts in the names of folders (`day=1`).

    Spark alone would leave out files beside such folders, and find one type for all texts of a
    partition: 007 would become 7, and 1 text as soon as there is another text.

    path: as `readable` returned it. files: URLs. base: the folder above the partitions; None for
    `source`, or for the start of a pattern. Raises ConfigError for files in other folders, and if
    files differ in their partitions.
    """
    most, start = len(split_path(path)[1]), split_path(absolute(base) if base else root_of(path))[1]
    found: dict[tuple[str, ...], str] = {}
    for file in sorted(files):
        *folders, name = split_path(file)[1]
        if base and [*map(unquote, (*folders, name))][: len(start)] != start:
            raise ConfigError(f"--read-option basePath={base}: {shown(file)} is in another folder")
        if not all("=" in folder[1:] for folder in folders[most:]):
            raise ConfigError(
                f"{shown(file)} is in a folder within {source}: move it, or add --read-option "
                "recursiveFileLookup=true"
            )
        parts = (folder.partition("=") for folder in folders[len(start) :] if "=" in folder[1:])
        found.setdefault(tuple(name for name, _, _ in parts), file)
    names, *others = found
    if others:
        one, other = sorted(shown(file) for file in list(found.values())[:2])
        raise ConfigError(
            f"{one} and {other} are in folders of different partitions: load them one by one, or "
            "without the values in the names of folders, --read-option recursiveFileLookup=true"
        )
    if len({name.lower() for name in names}) < len(names):
        raise ConfigError(
            f"{shown(found[names])} is in several folders of one partition: rename all but one"
        )
    return {unquote(unquote(name)): _partition(name) for name in names}


def _partition(name: str) -> Column:
    """The text of a partition in the URL of a file; null for Hive's name of null."""
    from pyspark.sql import functions as sf

    found = sf.regexp_extract("_metadata.file_path", f"^.*/{re.escape(name)}=([^/]*)/", 1)
    # Writers escape some characters, and the URL escapes those again. A plus is not a space.
    once = sf.regexp_replace(found, "%25(?=[0-9A-Fa-f]{2})", "%")
    text = sf.url_decode(sf.replace(once, sf.lit("+"), sf.lit("%2B")))
    return sf.when(found != "__HIVE_DEFAULT_PARTITION__", text)


def with_partitions(rows: DataFrame, found: Mapping[str, Column]) -> DataFrame:
    """The rows of files with their partitions, except those that the files have as columns."""
    own = {name.lower() for name in rows.columns}
    return rows.withColumns({name: found[name] for name in found if name.lower() not in own})


def without_password(where: str) -> str:
    """A path or URL without user and query, which may contain a password."""
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?;].*", "", where))


ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".orc": "orc",
}
"""Ending of a file's name -> its format."""

PACKED = (".gz", ".bz2", ".zst", ".deflate", ".lz4", ".snappy")
"""Endings of compressed text, which Spark unpacks; the last three as Hadoop writes them."""

_UNREADABLE = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), "save the sheet as CSV"),
    **dict.fromkeys((".zip", ".xz", ".7z", ".tar", ".tgz", ".br", ".z", ".lzo"), "unpack it"),
}
"""Ending -> what to do with the file."""

_CONTENTS = {
    rb"\x1f\x8b": ".gz",
    rb"BZh[1-9]1AY&SY": ".bz2",
    rb"\x28\xb5\x2f\xfd": ".zst",
    rb"\x04\x22\x4d\x18": "a frame of lz4",
    rb"\xff\x06\x00\x00sNaPpY": "a frame of snappy",
    rb"\xfd7zXZ": ".xz",
    rb"PK\x03\x04": ".zip, perhaps a spreadsheet",
    rb"\xd0\xcf\x11\xe0": "a spreadsheet",
    rb"ARROW1\x00": "Arrow's own format",
    rb"Obj\x01": "Avro",
}
"""How files begin -> the ending of compressed text, or what else they are."""


def format_of(source: str, files: Collection[str]) -> str:
    """The format of a source's files, from their names; from their contents if they have no ending.

    files: URLs. Raises ConfigError if a file has none of the known endings, or if they differ.
    """
    found: dict[str, str] = {}
    unknown: list[str] = []
    for file in files:
        name = shown(file)
        _check_ending(name)
        kind = ENDINGS.get(_ending(name)) or _content(name)
        if kind is not None and kind in ENDINGS.values():
            found.setdefault(kind, name)
        else:
            unknown.append(name)
    if unknown:
        cure = f"name it, as in --format csv ({', '.join(dict.fromkeys(ENDINGS.values()))})"
        if found:
            pattern = f"*{_ending(next(iter(found.values())))}*"
            cure = f"leave it out, as with --read-option pathGlobFilter='{pattern}', or {cure}"
        raise ConfigError(f"{unknown[0]}: its name does not tell its format: {cure}")
    if len(found) > 1:
        raise ConfigError(
            f"{source} has files of several formats ({', '.join(found.values())}): choose one with "
            "--format, and its files with --read-option pathGlobFilter='*.csv'"
        )
    return next(iter(found))


def _ending(name: str) -> str:
    """The ending of a file's name in lower case, without that of a compression."""
    whole = os.path.basename(name).lower()  # noqa: PTH119
    for ending in PACKED:
        whole = whole.removesuffix(ending)
    return os.path.splitext(whole)[1]  # noqa: PTH122


def _check_ending(name: str) -> str:
    """The last ending of a file's name. Raises ConfigError if Spark reads no such files."""
    ending = os.path.splitext(name)[1]  # noqa: PTH122
    if cure := _UNREADABLE.get(ending.lower()):
        raise ConfigError(f"{name}: Spark does not read {ending}: {cure}")
    return ending


def _content(name: str) -> str | None:
    """What a local file is: `parquet`, `orc` or see `_CONTENTS`; None if that is not known."""
    if not os.path.isfile(name):  # noqa: PTH113
        return None
    with Path(name).open("rb") as stream:
        start = stream.read(16)
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4))
        end = stream.read()
    if start[:4] == end and end in (b"PAR1", b"PARE"):  # E: with an encrypted footer
        return "parquet"
    if start[:3] == end[:3] == b"ORC":
        return "orc"
    return next((kind for mark, kind in _CONTENTS.items() if re.match(mark, start)), None)


def check_contents(files: Collection[str], kind: str) -> None:
    """Raises ConfigError for files that Spark would not read as files of this format.

    Of URLs that are not local, only the names are known.
    """
    is_text = kind not in ("parquet", "orc")
    for file in files:
        name = shown(file)
        last, content = _check_ending(name), _content(name)
        if is_text and content not in (None, last if last in PACKED else None):
            cure = f"add {content} to its name" if content in PACKED else "convert or unpack it"
            raise ConfigError(f"{name} is not {kind} but {content}: {cure}")
        if not is_text and content != kind and os.path.isfile(name):  # noqa: PTH113
            what = f"is {content}" if content else "is another format, or not complete"
            raise ConfigError(
                f"{name} is not {kind}: it {what}; if it is text, name its format, as in "
                "--format csv"
            )
