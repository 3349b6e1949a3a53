"""The layers: which may import which, and which one knows clients, scripts and keys.

Each rule is a function from source text to offences, so each is also tested on an offender. Also:
what an installation without extras can import, and names of classes.
"""

import ast
import functools
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

ON_CORE = {"core", "producer", "manager", "consumer", "admin", "embedded", "outbox"}
ON_TOP = {"cli", "gateway", "otel", "pipeline", "testing"}
FACE = {"middleware"}
"""Modules of the public package; nothing below it knows them."""
ROLES = {"producer", "manager", "consumer"}
INBOX = ("lisa.outbox.inbox", "lisa.outbox.tables")
"""What of the outbox consumers may import; the other modules of the outbox use the producer."""
BELOW_CORE: dict[str, set[str]] = {
    "model": set(),
    "daemon": {"model"},
    "settings": {"model", "redis"},
    "transitions": {"model"},
    "redis": {"model", "daemon", "transitions"},
    "store": {"model", "transitions", "redis"},
    "delivery": {"model", "transitions", "redis", "store"},
    "metrics": {"model", "daemon", "transitions", "redis", "store"},
}
"""What each package of core may import besides itself."""

CLIENTS = re.compile(r"(Strict)?Redis(Cluster)?|Sentinel|\w*ConnectionPool|from_url")
RUNS_SCRIPTS = {"eval", "eval_ro", "evalsha", "evalsha_ro", "register_script", "script_load"}
RUNS_SCRIPTS |= {"fcall", "fcall_ro", "function_load"}
KEY = re.compile(
    r":(body|done|g):"
    r"|:(waiting|policy|expiry|options|groups|stats|consumers|history|events|archived|ready"
    r"|entries|retry|garbage|attempts|reasons|leases|topics|managers|schema|wake)$"
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text("utf-8") for path in (ROOT / "lisa").rglob("*.py")}


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a module; each rule walks them."""
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def imported(source: str) -> list[str]:
    """Full names, including late imports and imports for type checking."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def wrong_imports(module: str, source: str) -> list[str]:
    """Imports that violate the layers, and those in core that do not point down."""
    part, names = second(module), imported(source)
    if part == "gateway":  # uses roles by their packages only
        roles = [name for name in names if second(name) in ROLES]
        return [name for name in roles if module_of(name) != module_of(f"lisa.{second(name)}")]
    if part in ON_TOP:
        return []
    # Everything else is the public package.
    allowed = {"core", part} if part in ON_CORE else ON_CORE | FACE | {part}
    if ".management.commands." in module:  # Django's name of a command line
        allowed.add("cli")
    if part == "outbox" and module not in INBOX:
        allowed.add("producer")
    wrong = [name for name in names if name.startswith("lisa.") and second(name) not in allowed]
    if part == "consumer":
        wrong = [name for name in wrong if not name.startswith(INBOX)]
    if part == "core" and module != "lisa.core":
        package = module.split(".")[2]
        below = BELOW_CORE[package] | {package}
        inner = [name for name in names if name.startswith("lisa.core.")]
        wrong += [name for name in inner if name.split(".")[2] not in below]
    return wrong


def second(name: str) -> str:
    return f"{name}.".split(".")[1]


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """The dotted name of each call."""
    for node in nodes(source):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def made_clients(module: str, source: str) -> list[str]:
    """Calls that construct a Redis client outside core.redis.connection."""
    if module == "lisa.core.redis.connection":
        return []
    bound = {
        one.asname or one.name.split(".")[0]
        for node in nodes(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
        if (getattr(node, "module", None) or one.name).split(".")[0] == "redis"
    }
    names = [name.split(".") for name, _ in calls(source)]
    return [name[-1] for name in names if name[0] in bound and CLIENTS.fullmatch(name[-1])]


def run_scripts(module: str, source: str) -> list[str]:
    """Scripts run, or Lua files named, outside core.transitions."""
    if module.startswith("lisa.core.transitions"):
        return []
    found = [text for text in strings(source) if re.search(r"\w\.lua$", text)]
    for name, call in calls(source):
        method = name.rpartition(".")[2]
        if method == "execute_command" and call.args and isinstance(call.args[0], ast.Constant):
            method = str(call.args[0].value).lower().replace(" ", "_")
        found += [method] if "." in name and method in RUNS_SCRIPTS else []
    return found


def strings(source: str) -> Iterator[str]:
    """String constants and the constant pieces of f-strings, without docstrings."""
    prose = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def built_keys(module: str, source: str) -> list[str]:
    """Parts of keys outside core.model.keys."""
    if module == "lisa.core.model.keys":
        return []
    return [text for text in strings(source) if KEY.search(text)]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDS = PROJECT["dependencies"]
EXTRAS = [
    line
    for name, lines in PROJECT["optional-dependencies"].items()
    if name != "dev"
    for line in lines
]


@functools.cache
def provided(*lines: str) -> set[str]:
    """Top-level modules of the distributions that these lines of pyproject.toml require.

    One that this version of Python does not need is not installed; its module has its name.
    """
    required = {plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}
    providers = importlib.metadata.packages_distributions().items()
    installed = {root for root, names in providers if required & {plain(name) for name in names}}
    return installed | {name.replace("-", "_") for name in required}


def undeclared(_module: str, source: str) -> list[str]:
    """Third-party imports that pyproject.toml does not require.

    Every type checker knows typing_extensions; `import lisa` without it is tested with the wheel.
    """
    roots = {name.split(".")[0] for name in imported(source)}
    known = {"lisa", "typing_extensions"} | provided(*NEEDS, *EXTRAS)
    return sorted(roots - sys.stdlib_module_names - known)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def only_of_an_extra(module: str, source: str) -> list[str]:
    """What a module that producers and consumers need imports at once and only extras install."""
    if second(module) not in {"", "core", "producer", "consumer", "middleware"}:
        return []
    if module.startswith("lisa.core.settings") or module == "lisa.core.metrics.page":
        return []
    at_once = [
        node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    roots = {name.split(".")[0] for node in at_once for name in imported(ast.unparse(node))}
    return sorted(roots - sys.stdlib_module_names - {"lisa"} - provided(*NEEDS))


def module_of(name: str) -> Path | None:
    """The module that an imported name is, or comes from; None outside Lisa."""
    while name.startswith("lisa"):
        path = ROOT.joinpath(*name.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.exists():
                return found
        name = name.rpartition(".")[0]
    return None


RULES = [wrong_imports, made_clients, run_scripts, built_keys, undeclared, only_of_an_extra]


@pytest.mark.parametrize("rule", RULES)
def test_every_module_keeps(rule: Callable[[str, str], list[str]]) -> None:
    offences = {name: rule(name, source) for name, source in SOURCES.items()}
    assert {name: found for name, found in offences.items() if found} == {}


OFFENDERS = [
    (wrong_imports, "lisa.core.store.store", "from lisa import producer"),
    (wrong_imports, "lisa.consumer.reader", "def f():\n  import lisa.manager.promoter"),
    (wrong_imports, "lisa.consumer.handlers", "from lisa.middleware import Middleware"),
    (wrong_imports, "lisa.consumer.handlers", "from lisa.outbox.relay import Relay"),
    (wrong_imports, "lisa.outbox.inbox", "from lisa.producer import Producer"),
    (wrong_imports, "lisa.django.run", "from lisa.cli.relay import main"),
    (wrong_imports, "lisa", "from lisa.cli.main import main"),
    (wrong_imports, "lisa.gateway.app", "from lisa.consumer import pull"),
    (wrong_imports, "lisa.core.model.keys", "import lisa.core.redis.flow"),
    (wrong_imports, "lisa.core.store.store", "from lisa.core.delivery import source"),
    (made_clients, "lisa.manager.promoter", "import redis\nredis.Redis()"),
    (made_clients, "lisa.cli.top", "import redis.asyncio as r\nr.Redis.from_url('redis://')"),
    (made_clients, "lisa.admin.x", "from redis.sentinel import Sentinel as S\nS.from_url([])"),
    (run_scripts, "lisa.core.store.store", "client.evalsha('ab', 0)"),
    (run_scripts, "lisa.admin.fsck", "client.execute_command('SCRIPT LOAD', 'return 1')"),
    (run_scripts, "lisa.manager.x", "path = 'promote.lua'"),
    (built_keys, "lisa.admin.fsck", "key = f'{root}:body:{id}'"),
    (built_keys, "lisa.manager.x", "key = root + ':waiting'"),
    (undeclared, "lisa.cli.x", "import fakeredis"),
    (only_of_an_extra, "lisa.producer.plan", "from pydantic import BaseModel"),
]


def test_each_rule_catches_offenders() -> None:
    for rule, module, source in OFFENDERS:
        assert rule(module, source) != [], source


def test_no_modules_import_each_other() -> None:
    imports = {
        module: {name if name in SOURCES else name.rpartition(".")[0] for name in imported(source)}
        for module, source in SOURCES.items()
    }
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_no_two_public_classes_share_a_name() -> None:
    """A name in a log or a diff is clear. Django prescribes two of them."""
    homes = defaultdict[str, list[str]](list)
    for module, source in SOURCES.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert shared.keys() <= {"Command", "Meta"}, shared
