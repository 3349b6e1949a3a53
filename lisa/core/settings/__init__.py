"""Settings from YAML, environment and flags, as one frozen model per role.

`ManagerSettings.load(path)`, and the same method of the other roles, reads the `lisa-delay-queue:`
root of a YAML file, overrides it with environment variables (`LISA_A__B`) and flags, and raises
ConfigError with a one-line message for any invalid value.
"""

from lisa.core.model.extras import requires

with requires("standard"):
    from lisa.core.settings.gateway import CamelliaSettings, GatewayServerSettings, GrpcSettings
    from lisa.core.settings.roles import (
        ROLES,
        ConsumerSettings,
        GatewaySettings,
        ManagerSettings,
        ProducerSettings,
        RelaySettings,
        RoleSettings,
    )
    from lisa.core.settings.sections import (
        ConsumerServerSettings,
        GroupSettings,
        ManagerServerSettings,
        RedisSettings,
        RelaySection,
    )

__all__ = [
    "ROLES",
    "CamelliaSettings",
    "ConsumerServerSettings",
    "ConsumerSettings",
    "GatewayServerSettings",
    "GatewaySettings",
    "GroupSettings",
    "GrpcSettings",
    "ManagerServerSettings",
    "ManagerSettings",
    "ProducerSettings",
    "RedisSettings",
    "RelaySection",
    "RelaySettings",
    "RoleSettings",
]
