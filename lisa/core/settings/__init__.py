"""The YAML, environment and flags of each role, as one frozen model per role.

`ManagerSettings.load(path)`, and the same of producer, consumer and gateway, reads the
`lisa-delay-queue:` root of a YAML file, puts environment (`LISA_A__B`) and flags on top, and raises
one `ConfigError`, in one line, for whatever cannot work.
"""

from lisa.core.settings.gateway import CamelliaSettings, GatewayServerSettings
from lisa.core.settings.roles import (
    ROLES,
    ConsumerSettings,
    GatewaySettings,
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
    "CamelliaSettings",
    "ConsumerServerSettings",
    "ConsumerSettings",
    "GatewayServerSettings",
    "GatewaySettings",
    "GroupSettings",
    "ManagerServerSettings",
    "ManagerSettings",
    "ProducerSettings",
    "RedisSettings",
    "RoleSettings",
]
