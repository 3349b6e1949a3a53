"""Where values come from: flags above environment above file; each key checked by name.

Keys are turned into the models' names before anything is validated, so that kebab-case,
camelCase and snake_case are equal and an unknown key can be answered with the nearest valid one.
A key of another role is accepted, since one file may serve several roles.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from lisa.core.settings import names
from lisa.core.settings.environment import read_environment
from lisa.core.settings.file import read_file

Tree = dict[str, Any]
_CREDENTIALS = ("username", "password", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Layers:
    """The values of every source by the models' names: what is given above hides what is below."""

    overrides: Tree
    environment: Tree
    file: Tree
    path: Path | None

    @classmethod
    def read(
        cls,
        path: Path | str | None,
        overrides: Mapping[str, Any],
        roles: Sequence[type[BaseModel]],
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Read and merge all sources; `ConfigError` names source, key and cure."""
        chosen = path if path is not None else environ.get("LISA_CONFIG")
        file_path = Path(chosen) if chosen else None
        flags = names.normalise("options", overrides, roles)
        env = read_environment(environ, roles)
        url_above = any(_redis(layer).get("url") for layer in (flags, env))
        in_file: Tree = {}
        if file_path is not None:
            root, spring = read_file(file_path)
            in_file = names.normalise(str(file_path), root, roles)
            if not url_above and not _redis(in_file).get("url"):
                server = spring.settings(str(file_path))
                in_file = {**in_file, "redis": {**server, **_redis(in_file)}}
        if url_above and (redis := _redis(in_file)):
            # The file's user and password belong to the file's server, not to another one.
            kept = {key: value for key, value in redis.items() if key not in _CREDENTIALS}
            in_file = {**in_file, "redis": kept}
        return cls(flags, env, in_file, file_path)

    def origin(self, location: Sequence[str | int]) -> str:
        """The source that a value at `location` came from, for error messages."""
        for name, layer in (("options", self.overrides), ("environment", self.environment)):
            if location and _holds(layer, location):
                return name
        return str(self.path) if self.path else "settings"


def _redis(layer: Tree) -> Tree:
    section = layer.get("redis")
    return section if isinstance(section, dict) else {}


def _holds(layer: Any, location: Sequence[str | int]) -> bool:
    for step in location:
        try:
            layer = layer[step]
        except (LookupError, TypeError):
            return False
    return True
