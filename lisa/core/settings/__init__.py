"""The YAML, environment and flags of each role, as one frozen model per role.

`ManagerSettings.load(path)`, `ProducerSettings.load(path)` and `ConsumerSettings.load(path)` read
the `lisa-delay-queue:` root of a YAML file, put environment (`LISA_A__B`) and flags on top, and
raise one `ConfigError`, in one line, for whatever cannot work.
"""

from lisa.core.settings.roles import (
    ROLES,
    ConsumerSettings,
    ManagerSettings,
    ProducerSettings,
    RoleSettings,
)
from lisa.core.settings.sections import (
    ConsumerServerSettings,
    GroupSettings,
    ManagerServerSettings,
    RedisSettings,
)

__all__ = [
    "ROLES",
    "ConsumerServerSettings",
    "ConsumerSettings",
    "GroupSettings",
    "ManagerServerSettings",
    "ManagerSettings",
    "ProducerSettings",
    "RedisSettings",
    "RoleSettings",
]
