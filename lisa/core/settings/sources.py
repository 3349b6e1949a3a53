"""The sources of settings: options over environment over file.

Keys are converted to the models' names before validation, so kebab-case, camelCase and snake_case
are equivalent, and an error for an unknown key can suggest the nearest valid one. Keys of other
roles are accepted, since one file may serve several roles.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, InitSettingsSource

from lisa.core.settings import names
from lisa.core.settings.environment import read_environment
from lisa.core.settings.file import read_file, spring_settings

Tree = dict[str, Any]
_CREDENTIALS = ("username", "password", "sentinel_username", "sentinel_password")
_TLS_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")


class Source(InitSettingsSource):
    """The values of one source, by field name. Errors refer to the source by its `name`."""

    def __init__(self, role: type[BaseSettings], name: str, values: Tree) -> None:
        super().__init__(role, {key: values[key] for key in values if key in role.model_fields})
        self.name = name

    def holds(self, location: Sequence[str | int]) -> bool:
        """Whether the value at `location` comes from this source."""
        value: Any = self.init_kwargs
        for step in location:
            try:
                value = value[step]
            except (LookupError, TypeError):
                return False
        return True


class _FileSource(Source):
    """The values of the file, which may name the server under `spring.redis` instead."""

    def __init__(self, role: type[BaseSettings], path: Path, roles: names.Models) -> None:
        root, self._spring = read_file(path)
        super().__init__(role, str(path), names.normalise(str(path), root, roles))

    def __call__(self) -> Tree:
        redis = _redis(self.init_kwargs)
        if url := _redis(self.current_state).get("url"):
            # The file's credentials belong to the file's server, not to another one. Its TLS files
            # may serve for both.
            has_tls = str(url).startswith("rediss")
            left_out = _CREDENTIALS if has_tls else (*_CREDENTIALS, *_TLS_FILES)
            redis = {key: value for key, value in redis.items() if key not in left_out}
        elif not redis.get("url"):
            redis = {**spring_settings(self.name, self._spring), **redis}
        return {**self.init_kwargs, "redis": redis}


def read_sources(
    role: type[BaseSettings],
    path: Path | str | None,
    overrides: Mapping[str, Any],
    roles: names.Models,
) -> tuple[Source, ...]:
    """All sources of a role's settings, highest precedence first.

    Raises ConfigError that names source, key and fix.
    """
    chosen = path if path is not None else os.environ.get("LISA_CONFIG", "").strip()
    return (
        Source(role, "options", names.normalise("options", overrides, roles)),
        Source(role, "environment", read_environment(os.environ, roles)),
        _FileSource(role, Path(chosen), roles) if chosen else Source(role, "settings", {}),
    )


def _redis(values: Tree) -> Tree:
    section = values.get("redis")
    return section if isinstance(section, dict) else {}
