"""Access control: tokens, scopes and topics; listen addresses, Host headers, foreign origins."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from starlette.requests import HTTPConnection

from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.settings import GatewayServerSettings, GatewaySettings
from lisa.gateway.access import Access, Forbidden, Scope, Unauthorized, is_loopback, read_tokens
from lisa.gateway.context import GatewayContext
from tests.gateways import Gateway, new_topic

SHOP, MAILER, ROOT = "shop-" + "s" * 16, "mailer-" + "m" * 16, "root-" + "r" * 16
TOKENS = f"""
tokens:
  - {{name: shop, token: {SHOP}, scopes: [produce], topics: [orders, "mail.*"]}}
  - {{name: mailer, token: {MAILER}, scopes: consume, topics: "mail.*"}}
  - {{name: root, token-env: TOKEN_OF_ROOT}}
"""


@pytest.fixture
def tokens_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKEN_OF_ROOT", ROOT)
    path = tmp_path / "tokens.yml"
    path.write_text(TOKENS, encoding="utf-8")
    return path


def asking(
    secret: str | None = None, client: str = "127.0.0.1", host: str = "localhost"
) -> HTTPConnection:
    headers = [] if secret is None else [(b"authorization", b"Bearer " + secret.encode())]
    headers.append((b"host", host.encode()))
    return HTTPConnection({"type": "http", "headers": headers, "client": (client, 1)})


async def hub_of(**server: object) -> GatewayContext:
    return GatewayContext(GatewaySettings.load(gateway_server=server))


async def test_a_token_allows_its_scopes_on_its_topics(tokens_file: Path) -> None:
    context = await hub_of(tokens_file=tokens_file)
    assert context.require(asking(SHOP), Scope.PRODUCE, "orders").name == "shop"
    assert context.require(asking(SHOP), Scope.PRODUCE, "mail.welcome").name == "shop"
    assert context.require(asking(MAILER), Scope.CONSUME, "mail.welcome").name == "mailer"
    assert context.require(asking(MAILER), None, "mail.welcome").name == "mailer"
    for scope in Scope:
        assert context.require(asking(ROOT), scope, "anything").name == "root"
        assert context.require(asking(ROOT), scope).name == "root"
    refused: list[tuple[str, Scope | None, str | None]] = [
        (SHOP, Scope.CONSUME, "orders"),
        (SHOP, Scope.PRODUCE, "order"),
        (SHOP, Scope.PRODUCE, "Orders"),
        (MAILER, Scope.CONSUME, "mail"),
        (MAILER, Scope.PRODUCE, "mail.welcome"),
        (SHOP, Scope.OPERATE, "orders"),
        (SHOP, None, "others"),
        (SHOP, Scope.PRODUCE, None),
    ]
    for secret, wanted, topic in refused:
        with pytest.raises(Forbidden, match="does not allow"):
            context.require(asking(secret), wanted, topic)


async def test_a_missing_or_unknown_token_is_unauthorized(tokens_file: Path) -> None:
    context = await hub_of(tokens_file=tokens_file)
    basic = HTTPConnection(
        {"type": "http", "headers": [(b"authorization", b"Basic " + SHOP.encode())]}
    )
    wrong = ("x", SHOP + "x", SHOP[:-1], SHOP.upper(), "ü", " ")
    for connection in (basic, asking(), *map(asking, wrong)):
        with pytest.raises(Unauthorized):
            context.require(connection, None)


async def test_without_tokens_everything_is_allowed_but_topic_names_are_checked() -> None:
    context = await hub_of()
    assert context.require(asking(), Scope.OPERATE, "orders").name == "everyone"
    with pytest.raises(InvalidMessage):
        context.require(asking(), Scope.PRODUCE, "or ders")


FORWARDING = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "Via", "X-Real-IP")


async def test_compat_auth_none_applies_to_local_clients_only(tokens_file: Path) -> None:
    """Host names must be local, too: a page's host may resolve here (DNS rebinding). Proxies may
    rewrite them."""
    context = await hub_of(tokens_file=tokens_file, compat_auth="none")
    closed = await hub_of(tokens_file=tokens_file)
    for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
        found = context.require(asking(host=host), Scope.PRODUCE, "orders", compat=True)
        assert found.name == "everyone"
    refused = [asking(client="192.0.2.1"), asking(host="evil.example:8080"), asking(host="[")]
    for header in FORWARDING:
        refused.append(asking(host="localhost"))
        refused[-1].scope["headers"].append((header.lower().encode(), b"203.0.113.7"))
    for connection in refused:
        with pytest.raises(Unauthorized):
            context.require(connection, Scope.CONSUME, "orders", compat=True)
    for host in ("evil.example:8080", "["):
        named = asking(ROOT, host=host)
        assert context.require(named, Scope.CONSUME, "orders", compat=True).name == "root"
    for gateway, is_compatible in ((context, False), (closed, True)):
        with pytest.raises(Unauthorized):
            gateway.require(asking(), Scope.PRODUCE, "orders", compat=is_compatible)


ALL_V4 = "0.0.0.0"  # noqa: S104  refused is what it shall be


@pytest.mark.parametrize("host", [ALL_V4, "::", "192.0.2.1", "queue.example.com"])
def test_a_public_address_needs_tokens(host: str, tokens_file: Path) -> None:
    def access(**server: object) -> Access:
        settings = GatewaySettings.load(gateway_server={"host": host} | server)
        return Access.of(settings.gateway_server)

    with pytest.raises(ConfigError, match=r"tokens-file, or listen on 127\.0\.0\.1"):
        access()
    assert not access(tokens_file=tokens_file).is_open
    with pytest.raises(ConfigError, match="requires a loopback address"):
        access(tokens_file=tokens_file, compat_auth="none")


def test_is_loopback() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("", ALL_V4, "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example.com", "x"):
        assert not is_loopback(host), host


VALID = "name: a, token: 0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[", "not readable as YAML"),
        ("[x]", "expected a mapping with name, token, scopes"),
        ("[{token: 0123456789abcdef}]", "name is missing"),
        ("[{name: a, token-env: NOT_THERE}]", "NOT_THERE is not set"),
        ("[{name: a, token: short}]", "at least 16"),
        ("[{name: a, token: 0123456789abcdeü}]", "ASCII"),
        (f"[{{{VALID}, scope: [produce]}}]", "unknown key 'scope'"),
        (f"[{{{VALID}, scopes: [all]}}]", "consume, operate"),
        (f"[{{{VALID}, topics: ['a b']}}]", "topics must be names"),
        (f"[{{{VALID}}}, {{name: a, token: 0123456789abcdeF}}]", "two tokens have the same name"),
    ],
)
def test_an_invalid_tokens_file_is_rejected_in_one_line(
    tmp_path: Path, content: str, fault: str
) -> None:
    path = tmp_path / "tokens.yml"
    path.write_text(f"tokens: {content}", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_tokens(path)
    assert fault in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tokens_have_different_secrets_and_names(tmp_path: Path) -> None:
    """Also from the configured one, whose name is reserved."""
    path, secret = tmp_path / "tokens.yml", SecretStr("0123456789abcdef")
    path.write_text(f"tokens: [{{{VALID}}}, {{name: b, token: 0123456789abcdef}}]")
    with pytest.raises(ConfigError, match="two tokens have the same secret"):
        Access.of(GatewayServerSettings(tokens_file=path))
    path.write_text(f"tokens: [{{{VALID}}}]")
    with pytest.raises(ConfigError, match="two tokens have the same secret"):
        Access.of(GatewayServerSettings(tokens_file=path, token=secret))
    path.write_text("tokens: [{name: token, token: fedcba9876543210}]")
    with pytest.raises(ConfigError, match="rename the token"):
        Access.of(GatewayServerSettings(tokens_file=path, token=secret))
    assert Access.of(GatewayServerSettings(tokens_file=path)).by_name("token")


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOP", "MAILER", "OPERATIONS"):
        monkeypatch.setenv(f"LISA_TOKEN_{name}", name * 8)
    found = read_tokens(Path(__file__).parents[2] / "configs" / "tokens.yml")
    assert [token.name for token in found] == ["shop", "mailer", "operations"]


# Through a real gateway ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(redis_url: str) -> Iterator[Gateway]:
    with Gateway(redis_url, tokens=TOKENS, env={"TOKEN_OF_ROOT": ROOT}) as running:
        yield running


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_secrets_are_not_logged(guarded: Gateway) -> None:
    guarded.client.get(f"/v1/topics?token={ROOT}", headers=bearer(ROOT))
    assert not [line for line in guarded.said if ROOT in line or SHOP in line]


@pytest.mark.parametrize(
    ("arguments", "env", "reason"),
    [
        (["--host", ALL_V4], {}, "needs tokens"),
        pytest.param(["--host", "::"], {}, "needs tokens", marks=pytest.mark.full),
        (["--workers", "2"], {"SSL_CERT_FILE": "/none"}, "SSL_CERT_FILE=/none: cannot be read"),
        ([], {"SSL_CERT_FILE": "", "SSL_CERT_DIR": "/none"}, "SSL_CERT_DIR=/none: cannot be"),
        ([], {"LISA_GATEWAY_SERVER__PUSH_ALLOW": "a/b"}, "push-allow: 'a/b' is neither"),
        ([], {"LISA_GATEWAY_SERVER__TRUSTED_PROXIES": "proxy"}, "'proxy' does not appear to be"),
    ],
)
def test_a_start_that_is_impossible_ends_with_2_and_one_line(
    redis_url: str, arguments: list[str], env: dict[str, str], reason: str
) -> None:
    gateway = Gateway(redis_url, *arguments, env=env)
    try:
        assert gateway.process.wait(20) == 2
    finally:
        gateway.end()
    (line,) = gateway.said
    assert reason in line


def test_an_open_gateway_accepts_local_host_names_only(gateway: Gateway) -> None:
    """A page whose host name resolves to the gateway (DNS rebinding) is refused, and so is a proxy:
    it may rewrite Host to a local name, and its client may be anyone.
    """

    def ask(**headers: str) -> httpx.Response:
        return gateway.client.get("/v1/topics", headers=headers)

    for host in ("evil.example", "127.0.0.1.evil.example", "192.0.2.1", "[", "a]b", "[::1"):
        assert ask(Host=host).status_code == 403
    for host in ("localhost", "localhost:1234", "[::1]:80", "127.0.0.1"):
        assert ask(Host=host).status_code == 200
    for header in FORWARDING:
        for host in ("localhost", "127.0.0.1"):
            answer = ask(Host=host, **{header: "203.0.113.7"})
            assert (answer.status_code, "proxy" in answer.json()["detail"]) == (403, True)


def test_redirects_name_neither_scheme_nor_host(guarded: Gateway) -> None:
    headers = {"Host": "evil.example", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil"}
    for asked, expected in (
        ("/topics/orders/", "/topics/orders"),
        ("/topics/a%20b/?state=ready", "/topics/a%20b?state=ready"),
        ("//evil.example/", "/evil.example"),
        ("/v1/topics/", "/v1/topics"),
    ):
        answer = guarded.client.get(f"{guarded.url}{asked}", headers=headers | bearer(ROOT))
        assert (answer.status_code, answer.headers["location"]) == (307, expected)


def test_cross_site_writes_are_rejected(gateway: Gateway) -> None:
    """A browser sends forms to any address, with the page's origin."""
    path = f"/v1/topics/{new_topic()}/messages"

    def status(headers: dict[str, str]) -> int:
        form = {"Content-Type": "application/x-www-form-urlencoded"} | headers
        return gateway.client.post(path, content='{"body": 1}', headers=form).status_code

    for origin in ("http://evil.example", "null", "http://["):
        assert status({"Origin": origin}) == 403
    for site in ("cross-site", "same-site"):
        assert status({"Sec-Fetch-Site": site}) == 403
    assert gateway.client.get(path).status_code == 404
    assert status({"Origin": gateway.url, "Sec-Fetch-Site": "same-origin"}) == 201
    assert status({}) == 201


def test_every_response_has_the_security_headers(gateway: Gateway) -> None:
    for path in ("/healthz", "/v1/topics", "/no/such/page"):
        headers = gateway.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
