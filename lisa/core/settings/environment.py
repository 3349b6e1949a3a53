"""Reads environment variables: `LISA_PREFIX`, `LISA_MANAGER_SERVER__TIMEOUT`, `LISA_REDIS_URL`.

Two underscores separate section and key. Lists and mappings are written as JSON or YAML.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from lisa.core.model.addresses import KUBERNETES_VARIABLE
from lisa.core.model.errors import ConfigError
from lisa.core.settings import names
from lisa.core.settings.file import read_yaml

PREFIX = "LISA_"
_ALIASES = {"LISA_REDIS_URL": "redis__url"}
_ELSEWHERE = ("LISA_CONFIG",)
_OF_KUBERNETES = re.compile(KUBERNETES_VARIABLE)


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
