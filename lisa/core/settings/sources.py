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
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

from lisa.core.model.addresses import KUBERNETES_VARIABLE
from lisa.core.model.errors import ConfigError
from lisa.core.settings.file import read_file, read_yaml, spring_settings

_SECRET = ("url", "password", "username", "sentinel_password", "sentinel_username", "token")

PREFIX = "LISA_"
_ALIASES = {"LISA_REDIS_URL": "redis__url"}
_ELSEWHERE = ("LISA_CONFIG",)
_OF_KUBERNETES = re.compile(KUBERNETES_VARIABLE)

Tree = dict[str, Any]
Models = Sequence[type[BaseModel]]
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


def read_environment(environ: Mapping[str, str], roles: Models) -> dict[str, Any]:
    """The settings given by the environment, under the models' names.

    A variable with `__`, or one similar to a valid name, is refused if unknown; other `LISA_`
    variables are ignored. An empty value counts as not set. Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    valid = _valid(roles)
    for variable in sorted(environ, key=lambda name: (name in _ALIASES, name)):  # aliases win
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        if variable not in valid:
            _refuse_if_meant(variable, valid)
            continue
        *path, name = valid[variable].split("__")
        section, models = tree, roles
        for step in path:
            section, models = section.setdefault(step, {}), sections(models, step)
            if not isinstance(section, dict):
                raise ConfigError(f"environment: {variable} contradicts {PREFIX}{step.upper()}")
        value = _parsed(variable, environ[variable], models, name)
        section.update(normalise(f"environment {variable}", {name: value}, models))
    return tree


def _valid(roles: Models) -> dict[str, str]:
    """Every valid variable and the path of its key."""
    valid = dict(_ALIASES)
    for name, field in fields(roles).items():
        valid[PREFIX + name.upper()] = name
        if not is_list(field):
            for inner in fields(sections(roles, name)):
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


def _parsed(variable: str, text: str, models: Models, name: str) -> Any:
    """Parse JSON or YAML for a list, a mapping or a section; return other values as text."""
    if is_text(fields(models)[name]) or not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return read_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"environment: {variable} is not valid JSON; check its quotes") from None
    except ConfigError as error:
        raise ConfigError(f"environment: {variable}: {error}") from None


class Source(NamedTuple):
    """The values of one source, by field name. Errors refer to the source by its `name`."""

    name: str
    values: Tree

    def holds(self, location: Sequence[str | int]) -> bool:
        """Whether the value at `location` comes from this source."""
        value: Any = self.values
        for step in location:
            try:
                value = value[step]
            except (LookupError, TypeError):
                return False
        return True


def read_sources(
    role: type[BaseModel], path: Path | str | None, overrides: Mapping[str, Any], roles: Models
) -> list[Source]:
    """All sources of a role's settings, highest precedence first.

    Raises ConfigError that names source, key and fix.
    """
    chosen = path if path is not None else os.environ.get("LISA_CONFIG", "").strip()
    sources = [
        Source("options", normalise("options", overrides, roles)),
        Source("environment", read_environment(os.environ, roles)),
    ]
    if chosen:
        sources.append(_of_file(Path(chosen), roles, _redis(merged(sources))))
    else:
        sources.append(Source("settings", {}))
    own = role.model_fields.keys()
    return [
        Source(name, {key: value for key, value in values.items() if key in own})
        for name, values in sources
    ]


def merged(sources: Sequence[Source]) -> Tree:
    """The values of all sources: sections merge key by key, other values replace."""
    tree: Tree = {}
    for source in reversed(sources):
        tree = _over(tree, source.values)
    return tree


def _over(below: Tree, above: Tree) -> Tree:
    both = {key for key in below.keys() & above.keys() if isinstance(above[key], dict)}
    sections = {key: _over(below[key], above[key]) for key in both if isinstance(below[key], dict)}
    return {**below, **above, **sections}


def _of_file(path: Path, roles: Models, given: Tree) -> Source:
    """The values of the file, which may name the server under `spring.redis` instead.

    given: the settings `redis` of the sources above.
    """
    root, spring = read_file(path)
    values: Tree = normalise(str(path), root, roles)
    redis = _redis(values)
    if url := given.get("url"):
        # The file's credentials belong to the file's server, not to another one. Its TLS files may
        # serve for both.
        has_tls = str(url).startswith("rediss")
        left_out = _CREDENTIALS if has_tls else (*_CREDENTIALS, *_TLS_FILES)
        redis = {key: value for key, value in redis.items() if key not in left_out}
    elif not redis.get("url"):
        redis = {**spring_settings(str(path), spring), **redis}
    return Source(str(path), {**values, "redis": redis})


def _redis(values: Tree) -> Tree:
    section = values.get("redis")
    return section if isinstance(section, dict) else {}


def kebab(name: str) -> str:
    """The kebab-case spelling, used in messages and pages."""
    return name.replace("_", "-")


def fields(models: Models) -> dict[str, FieldInfo]:
    """The fields of all models, by name."""
    return {name: field for model in models for name, field in model.model_fields.items()}


def sections(models: Models, name: str) -> list[type[BaseModel]]:
    """The models of a section or a list of sections; empty for a plain value."""
    found: list[type[BaseModel]] = []
    for model in models:
        field = model.model_fields.get(name)
        for leaf in leaves(field.annotation) if field else ():
            if isinstance(leaf, type) and issubclass(leaf, BaseModel) and leaf not in found:
                found.append(leaf)
    return found


def is_list(field: FieldInfo) -> bool:
    """Whether the field holds several values."""
    return get_origin(field.annotation) is tuple


def is_text(field: FieldInfo) -> bool:
    """Whether the field holds text, which must not be parsed."""
    annotation = field.annotation
    union = get_origin(annotation) in (Union, types.UnionType)
    members = [_bare(member) for member in (get_args(annotation) if union else (annotation,))]
    return any(member in (str, SecretStr) for member in members)


def normalise(source: str, given: Mapping[Any, Any], models: Models, at: str = "") -> Any:
    """The same tree under the models' names, without keys that have no value.

    Raises ConfigError for an unknown key, a key given twice, and a section that is not a mapping.
    """
    known = fields(models)
    tree: dict[str, Any] = {}
    for key, value in given.items():
        name = to_snake(str(key))  # `poll-timeout-millis`, `pollTimeoutMillis`
        if name not in known:
            raise unknown(source, f"{at}{key}", name, models)
        if name in tree:
            raise ConfigError(f"{source}: {at}{key} is given twice; remove one")
        if value is not None:
            inner = sections(models, name)
            many = is_list(known[name])
            tree[name] = _value(source, value, inner, f"{at}{key}", many=many) if inner else value
    return tree


def _value(source: str, value: Any, models: Models, at: str, *, many: bool) -> Any:
    if many:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{source}: {at} is not a list; begin each entry with '- '")
        return [
            _value(source, entry, models, f"{at}[{index}]", many=False)
            for index, entry in enumerate(value)
        ]
    if isinstance(value, str) and "url" in fields(models):
        return {"url": value}
    if isinstance(value, BaseModel):
        return value
    if not isinstance(value, Mapping):
        keys = ", ".join(kebab(name) for name in fields(models))
        raise ConfigError(f"{source}: {at} is a section with its own keys: {keys}")
    return normalise(source, value, models, f"{at}.")


def unknown(source: str, shown: str, name: str, models: Models) -> ConfigError:
    """An error for an unknown key, with the nearest valid key or the section it belongs to."""
    hint = nearest(name, fields(models))
    for section in fields(models):
        if name in fields(sections(models, section)):
            hint = f"it belongs under {kebab(section)}"
    return ConfigError(f"{source}: unknown key {shown}; {hint}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean ...?`, or the list of valid names if none is similar."""
    spelled = [kebab(name) for name in valid]
    near = difflib.get_close_matches(kebab(name), spelled, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"valid are {', '.join(spelled)}"


def leaves(annotation: Any) -> Iterable[Any]:
    """The types of which an annotation is made."""
    members = get_args(annotation)
    if not members:
        yield annotation
    for member in members:
        yield from leaves(member)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
