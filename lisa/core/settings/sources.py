"""The sources of settings: options over environment over file.

Keys are converted to the models' names before validation, so kebab-case, camelCase and snake_case
are equivalent, and an error for an unknown key can suggest the nearest valid one. Keys of other
roles are accepted, since one file may serve several roles.

Environment variables are `LISA_PREFIX`, `LISA_MANAGER_SERVER__TIMEOUT`, `LISA_REDIS_URL`: two
underscores separate section and key. Lists and mappings are written as JSON or YAML.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource

from lisa.core.model.addresses import KUBERNETES_VARIABLE
from lisa.core.model.errors import ConfigError
from lisa.core.settings import names
from lisa.core.settings.file import read_file, read_yaml, spring_settings
from lisa.core.settings.names import kebab

_SECRET = (
    "url",
    "database",
    "password",
    "username",
    "sentinel_password",
    "sentinel_username",
    "token",
)

PREFIX = "LISA_"
_ALIASES = {"LISA_REDIS_URL": "redis__url"}
_ELSEWHERE = ("LISA_CONFIG",)
_OF_KUBERNETES = re.compile(KUBERNETES_VARIABLE)

Tree = dict[str, Any]
_CREDENTIALS = ("username", "password", "sentinel_username", "sentinel_password")
_TLS_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")


def explain(error: ValidationError, sources: Sequence[Source]) -> ConfigError:
    """A ConfigError for the first fault; further faults appear once it is fixed."""
    fault = error.errors(include_url=False)[0]
    location = fault["loc"]
    origins = (source.name for source in sources if location and source.holds(location))
    origin = next(origins, sources[-1].name)
    return ConfigError(f"{origin}: {_key(location)}{_text(fault)}")


def _key(location: Sequence[str | int]) -> str:
    key = ""
    for step in location:
        key += f"[{step}]" if isinstance(step, int) else f".{kebab(step)}"
    return f"{key[1:]}: " if key else ""


def _text(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "missing":
        return "is missing; add it"
    message = str(fault["msg"])
    if fault["type"] == "value_error":
        # Lisa's own checks already name the value and the fix.
        return message.removeprefix("Value error, ")
    text = message[:1].lower() + message[1:]
    if not any(step in _SECRET for step in fault["loc"]):
        text += f", not {fault['input']!r}"
    return f"{text}; put it in quotes" if fault["type"] == "string_type" else text


def read_environment(environ: Mapping[str, str], roles: names.Models) -> dict[str, Any]:
    """The settings given by the environment, under the models' names.

    A variable with `__`, or one similar to a valid name, is refused if unknown; other `LISA_`
    variables are ignored. An empty value counts as not set. Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    valid = _valid(roles)
    for variable in sorted(environ, key=lambda one: (one in _ALIASES, one)):  # aliases win
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        if variable not in valid:
            _refuse_if_meant(variable, valid)
            continue
        *path, name = valid[variable].split("__")
        section, models = tree, roles
        for step in path:
            section, models = section.setdefault(step, {}), names.sections(models, step)
            if not isinstance(section, dict):
                raise ConfigError(f"environment: {variable} contradicts {PREFIX}{step.upper()}")
        value = _value(variable, environ[variable], models, name)
        section.update(names.normalise(f"environment {variable}", {name: value}, models))
    return tree


def _valid(roles: names.Models) -> dict[str, str]:
    """Every valid variable and the path of its key."""
    valid = dict(_ALIASES)
    for name, field in names.fields(roles).items():
        valid[PREFIX + name.upper()] = name
        if not names.is_list(field):
            for inner in names.fields(names.sections(roles, name)):
                valid[f"{PREFIX}{name}__{inner}".upper()] = f"{name}__{inner}"
    return valid


def _refuse_if_meant(variable: str, valid: Mapping[str, str]) -> None:
    if variable in _ELSEWHERE or _OF_KUBERNETES.fullmatch(variable):
        return
    near = difflib.get_close_matches(variable, valid, n=1, cutoff=0.85)
    if near:
        raise ConfigError(f"environment: unknown name {variable}; did you mean {near[0]}?")
    if "__" in variable:
        raise ConfigError(
            f"environment: unknown name {variable}; names are LISA_SECTION__KEY, "
            "as in LISA_MANAGER_SERVER__TIMEOUT"
        )


def _value(variable: str, text: str, models: names.Models, name: str) -> Any:
    """Parse JSON or YAML for a list, a mapping or a section; return other values as text."""
    if names.is_text(names.fields(models)[name]) or not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return read_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"environment: {variable} is not valid JSON; check its quotes") from None
    except ConfigError as error:
        raise ConfigError(f"environment: {variable}: {error}") from None


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
