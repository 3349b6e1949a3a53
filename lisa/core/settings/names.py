"""Setting keys: spellings, and suggestions for unknown keys."""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

from lisa.core.model.errors import ConfigError

Models = Sequence[type[BaseModel]]


def snake(key: object) -> str:
    """Normalise a key: `poll-timeout-millis` and `pollTimeoutMillis` are `poll_timeout_millis`."""
    return to_snake(str(key))


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
        name = snake(key)
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
    spelled = [kebab(each) for each in valid]
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
