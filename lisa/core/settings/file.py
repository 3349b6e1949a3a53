"""Reads the YAML file: the `lisa-delay-queue` root, and the server under `spring.redis`."""

import difflib
import re
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import yaml

from lisa.core.model.errors import ConfigError
from lisa.core.settings.names import snake

ROOT = "lisa-delay-queue"
_TAG = "tag:yaml.org,2002:"
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TEXTS = ("topic", "group", "consumer", "username", "password", "token", "zone")
"""Settings whose values are text, as in Spring: `topic: 7`, `password: 123456`."""
_DATA = ("body", "headers")
"""Settings with users' data, in which keys have no meaning for Lisa."""

_FLOAT = r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_SCALARS = {
    "null": ("~nN", r"~|null|Null|NULL|"),
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9A-Fa-f]+"),
    "float": ("-+.0123456789", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    "merge": ("<", "<<"),
}
"""The core schema of YAML 1.2: first characters and pattern of what is not text.

PyYAML follows YAML 1.1, where `9:30` is 570, `010` is 8 and `no` is false. All of these are text
here, also `010`, which YAML 1.2 takes for 10: it may be a postal code.
"""


class _Loader(_Base):  # type: ignore[misc]  # the base class is chosen at run time
    """YAML 1.2. Refuses duplicate keys in a mapping; PyYAML would silently drop the first."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys before those of merged mappings (`<<`) are put in front of them."""
        if node not in self._checked:
            self._checked.add(node)
            seen: set[object] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.tag == f"{_TAG}merge":
                    continue
                same = {key.value, self.construct_object(key)}  # Python takes 1.0 and true for 1
                if same & seen:
                    line = key.start_mark.line + 1
                    text = f"{key.value} is given twice, again in line {line}; remove one"
                    raise ConfigError(text)
                seen |= same
        super().flatten_mapping(node)

    def get_single_node(self) -> Any:
        """The document, in which settings that are text have the tag of text."""
        return _with_texts(super().get_single_node(), {})


for _name, (_first, _pattern) in _SCALARS.items():
    _firsts = [*_first, ""] if _name == "null" else [*_first]
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern})$"), _firsts)


def _with_texts(node: Any, done: dict[int, Any]) -> Any:
    """A copy in which the values of `_TEXTS` are text, except within users' data."""
    if id(node) in done or not isinstance(node, yaml.CollectionNode):
        return done.get(id(node), node)
    done[id(node)] = made = type(node)(
        node.tag, [], node.start_mark, node.end_mark, node.flow_style
    )
    if isinstance(node, yaml.SequenceNode):
        made.value += [_with_texts(child, done) for child in node.value]
        return made
    for key, value in node.value:
        name = snake(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if name in _TEXTS and isinstance(value, yaml.ScalarNode) and value.tag in _NUMBERS:
            text = yaml.ScalarNode(f"{_TAG}str", value.value, value.start_mark, value.end_mark)
            made.value.append((key, text))
        else:
            made.value.append((key, value if name in _DATA else _with_texts(value, done)))
    return made


_NUMBERS = tuple(f"{_TAG}{kind}" for kind in ("int", "float", "bool"))


def read_yaml(text: str) -> Any:
    """Plain values from YAML 1.2. Raises yaml.YAMLError, and ConfigError for a duplicate key."""
    # `.load` with a subclass of SafeLoader creates plain values only.
    return yaml.load(text, _Loader)  # noqa: S506


def spring_settings(source: str, section: dict[str, Any]) -> dict[str, str]:
    """The `redis` settings of a section `spring.redis`; empty if it names no server."""
    values = {key: value for key, value in section.items() if value is not None}
    for key in ("cluster", "sentinel"):
        if key in values:
            raise ConfigError(
                f"{source}: spring.redis.{key} is not supported; "
                f"set the servers in {ROOT}.redis.url"
            )
    for key in ("host", "port", "password", "database", "url", "username", "ssl"):
        if "${" in str(values.get(key, "")):
            raise ConfigError(
                f"{source}: spring.redis.{key} is a placeholder, which only Spring resolves; "
                "set LISA_REDIS_URL"
            )
    redis = {key: str(values[key]) for key in ("username", "password") if values.get(key)}
    if "url" in values:
        redis["url"] = str(values["url"])
    elif {"host", "port", "database", "ssl"} & values.keys():
        host = quote(str(values.get("host", "localhost")), safe=":[]")
        scheme = "rediss" if _has_tls(source, values.get("ssl", False)) else "redis"
        port, database = values.get("port", 6379), values.get("database", 0)
        redis["url"] = f"{scheme}://{host}:{port}/{database}"
    return redis


def _has_tls(source: str, ssl: Any) -> bool:
    """Whether `spring.redis.ssl` is on: a boolean, its text, or a section, as in Spring Boot 3."""
    given = ssl.get("enabled", "bundle" in ssl) if isinstance(ssl, dict) else ssl
    text = str(given).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{source}: spring.redis.ssl is true or false, not {given!r}")
    return text == "true"


def read_file(path: Path) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The contents of the root and of `spring.redis`. Raises ConfigError with the fix."""
    document = _document(path)
    roots = [key for key in document if snake(key) == snake(ROOT)]
    if len(roots) > 1:
        raise ConfigError(f"{path}: the root {ROOT} is given twice; remove one")
    spring = _section(path, _section(path, document, "spring"), "redis")
    if not roots and not spring:
        near = difflib.get_close_matches(ROOT, [str(key) for key in document], n=1)
        hint = f"rename {near[0]}" if near else f"put the settings under '{ROOT}:'"
        raise ConfigError(f"{path}: there is no {ROOT} in this file; {hint}")
    root = _section(path, document, roots[0]) if roots else {}
    return root, {snake(key): value for key, value in spring.items()}


def _document(path: Path) -> dict[Any, Any]:
    try:
        document = read_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; check --config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8; save it as UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML{_where(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: there is no {ROOT} in this file; begin it with '{ROOT}:'")
    return document


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f" in line {mark.line + 1}" if mark else ""
    problem = getattr(error, "problem", None)
    return f"{line}: {problem}; fix that line" if problem else line


def _section(path: Path, document: dict[Any, Any], key: str) -> dict[Any, Any]:
    section = document.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {key} is a section; indent its keys under '{key}:'")
    return section
