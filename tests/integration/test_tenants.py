"""Keys and tokens: their tenants, validity and expiry; keys are not stored."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
import sqlalchemy as sa
from tinker.cli.auth_api import SelfApiKeyResponse
from tinker.lib._jwt_auth import _refresh_delay, jwt_claims

from support.databases import fresh_url
from support.http_harness import ALICE, BOB, Harness, close, make_harness
from tinsmith.auth import Caller
from tinsmith.auth import tenants as stored_tenants
from tinsmith.auth.keys import Keys
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import CACHE_S, StoredTenants
from tinsmith.auth.tokens import LIFETIME_S, Tokens
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import AUDIT, KEYS, TENANTS
from tinsmith.errors import InvalidTokenError, NotAuthenticatedError, NotFoundError, UserError

SIGNER = Signer(bytes(32))
NOW = 1_000_000.0


@dataclasses.dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    new_database = open_database(fresh_url(tmp_path))
    yield new_database
    new_database.close()


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tenants(keys: Keys, clock: Clock) -> StoredTenants:
    return StoredTenants(keys, Tokens(SIGNER, clock), clock)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Harness]:
    local_harness = make_harness(tmp_path, local=True)
    yield local_harness
    close(local_harness)


def test_a_server_takes_keys_of_other_prefixes_by_a_setting(tmp_path: Path, keys: Keys) -> None:
    new_harness = make_harness(tmp_path, local=True, key_prefixes=("slime-", "tml-"))
    for key, status in (("slime-dev-key", 200), ("tml-x", 200), ("sk-x", 401)):
        assert new_harness.post("create_session", {"tags": [], "sdk_version": "0"}, key=key).status_code == status
    close(new_harness)
    secret = keys.create("alice", prefix="slime-")[1]
    assert secret.startswith("slime-")
    closed = StoredTenants(keys, Tokens(SIGNER), prefixes=("slime-",))
    assert closed.authenticate(secret).tenant_id == "alice"
    for other in ("slime-dev-key", "tml-x"):
        with pytest.raises(NotAuthenticatedError):
            closed.authenticate(other)


# Keys as rows.


def test_a_key_is_random_and_nowhere_in_the_database(keys: Keys, database: Database) -> None:
    secrets = [keys.create("alice", "laptop")[1] for _ in range(20)]
    assert len(set(secrets)) == 20
    assert all(secret.startswith("tml-") and len(secret) >= 4 + 43 for secret in secrets)
    with database.read() as connection:
        for table in (KEYS, TENANTS, AUDIT):
            text = repr(connection.execute(sa.select(table)).all())
            assert not any(secret in text or secret.removeprefix("tml-") in text for secret in secrets)


def test_keys_are_listed_with_everything_but_themselves(keys: Keys) -> None:
    (first, _), (second, _) = keys.create("alice", "laptop"), keys.create("bob")
    keys.revoke(first.key_id)
    rows = keys.list_all()
    assert [(key.tenant_id, key.name, key.revoked_at is None) for key in rows] == [
        ("alice", "laptop", False),
        ("bob", "", True),
    ]
    assert rows[1] == second


def test_the_first_revocation_counts_and_both_are_recorded_once(keys: Keys, database: Database) -> None:
    key, _ = keys.create("alice")
    assert keys.revoke(key.key_id).revoked_at == keys.revoke(key.key_id).revoked_at
    with database.read() as connection:
        events = connection.execute(sa.select(AUDIT.c.tenant_id, AUDIT.c.event)).all()
    assert [tuple(row) for row in events] == [("alice", "key_created"), ("alice", "key_revoked")]
    with pytest.raises(NotFoundError, match="key 77"):
        keys.revoke(77)


@pytest.mark.parametrize("tenant_id", ["", "-a", "a b", "a/b", "a" * 65, "\xe4", "a\n"])
def test_a_tenant_that_cannot_be_named_is_refused(keys: Keys, tenant_id: str) -> None:
    with pytest.raises(UserError, match="not allowed"):
        keys.create(tenant_id)
    assert not keys.any()


def test_quotas_of_a_later_key_are_added_to_the_tenants_own(keys: Keys, database: Database) -> None:
    for quotas in ({"models": 1, "queued_bytes": 2}, None, {"models": 3}):
        keys.create("alice", quotas=quotas)
    with database.read() as connection:
        assert connection.scalar(sa.select(TENANTS.c.quotas)) == {"models": 3, "queued_bytes": 2}


# Authentication.


def test_only_known_keys_are_taken_and_each_names_its_tenant(tenants: StoredTenants, keys: Keys) -> None:
    key, secret = keys.create("alice", "laptop")
    _, other = keys.create("bob")
    assert tenants.authenticate(secret) == Caller("alice", key.key_id, "laptop")
    assert tenants.authenticate(other).tenant_id == "bob"
    with pytest.raises(NotAuthenticatedError, match="does not know the API key") as refusal:
        tenants.authenticate(secret + "x")
    assert secret[4:] not in str(refusal.value)


def test_a_known_key_costs_no_query_until_it_is_forgotten(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    _, secret = keys.create("alice")
    assert tenants.find_cached(secret) is None
    tenants.authenticate(secret)
    clock.now += CACHE_S - 0.01
    assert tenants.find_cached(secret) == tenants.authenticate(secret)
    clock.now += CACHE_S
    assert tenants.find_cached(secret) is None


def test_a_revocation_by_another_process_counts_within_the_promised_time(
    tenants: StoredTenants, keys: Keys, clock: Clock
) -> None:
    key, secret = keys.create("alice")
    tenants.authenticate(secret)
    keys.revoke(key.key_id)
    clock.now += CACHE_S
    assert tenants.find_cached(secret) is None
    with pytest.raises(NotAuthenticatedError, match="revoked"):
        tenants.authenticate(secret)


def test_anyone_is_local_until_there_is_a_key(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    for credential in ("tml-x", "eyJx"):
        assert tenants.authenticate(credential) == Caller("local")
    token = tenants.issue_token(tenants.authenticate("tml-x"))
    assert tenants.authenticate(token) == Caller("local")
    clock.now += CACHE_S / 2
    tenants.authenticate("tml-late")
    _, secret = keys.create("alice")
    clock.now += CACHE_S / 2
    for credential in ("tml-x", "tml-late", "eyJx", token):
        assert tenants.find_cached(credential) is None
        with pytest.raises(NotAuthenticatedError):
            tenants.authenticate(credential)
    assert tenants.authenticate(secret).tenant_id == "alice"


def test_a_server_that_had_a_key_never_opens_again(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    key, _ = keys.create("alice")
    keys.revoke(key.key_id)
    for _ in range(3):
        assert not tenants.accepts_anyone()
        clock.now += CACHE_S
    with pytest.raises(NotAuthenticatedError):
        tenants.authenticate("tml-x")


def test_invented_keys_do_not_fill_the_memory(tenants: StoredTenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tenants, "MAX_CACHED", 10)
    for index in range(100):
        tenants.authenticate(f"tml-{index}")
        assert len(tenants._cache) <= 10


def test_memory_holds_no_credential(tenants: StoredTenants, keys: Keys) -> None:
    _, secret = keys.create("alice")
    token = tenants.issue_token(tenants.authenticate(secret))
    tenants.authenticate(token)
    assert len(tenants._cache) == 2
    assert secret[4:] not in repr(tenants._cache)
    assert token[4:] not in repr(tenants._cache)


# Tokens.


def test_a_token_names_the_keys_tenant_and_reads_as_the_sdk_expects(tenants: StoredTenants, keys: Keys) -> None:
    key, secret = keys.create("alice", "laptop")
    token = tenants.issue_token(tenants.authenticate(secret))
    caller = tenants.authenticate(token)
    assert (caller.tenant_id, caller.key_id, caller.name) == ("alice", key.key_id, "laptop")
    assert token.startswith("eyJ")
    claims = jwt_claims(token)
    assert claims["exp"] - claims["iat"] == LIFETIME_S
    assert 0.45 * LIFETIME_S <= _refresh_delay(token) <= 0.55 * LIFETIME_S
    assert (claims["org_id"], claims["email"]) == ("alice", "alice@tinsmith.invalid")
    assert claims["sub"] == "tml:organization_user:alice"
    assert claims["iss"].startswith("passport-")


def test_a_token_dies_of_age(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    token = tenants.issue_token(tenants.authenticate(keys.create("alice")[1]))
    clock.now += LIFETIME_S - 1
    tenants.authenticate(token)
    clock.now += 1 + CACHE_S
    assert tenants.find_cached(token) is None
    with pytest.raises(InvalidTokenError, match="expired"):
        tenants.authenticate(token)


def test_a_token_dies_with_its_key(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    key, secret = keys.create("alice")
    _, other = keys.create("alice")
    token, spared = (tenants.issue_token(tenants.authenticate(key_secret)) for key_secret in (secret, other))
    tenants.authenticate(token)
    keys.revoke(key.key_id)
    clock.now += CACHE_S
    with pytest.raises(InvalidTokenError, match="revoked"):
        tenants.authenticate(token)
    assert tenants.authenticate(spared).tenant_id == "alice"


def test_a_token_of_a_token_ends_with_the_first(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    token = tenants.issue_token(tenants.authenticate(keys.create("alice")[1]))
    clock.now += LIFETIME_S / 2
    second = tenants.issue_token(tenants.authenticate(token))
    assert jwt_claims(second)["exp"] == jwt_claims(token)["exp"]


def _make_unsigned_token(claims: dict) -> str:
    header, body = ({"alg": "none", "typ": "JWT"}, claims)
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, body))
    return ".".join([*parts, ""])


def test_no_token_but_our_own_is_taken(tenants: StoredTenants, keys: Keys, clock: Clock) -> None:
    _, secret = keys.create("alice")
    good = tenants.issue_token(tenants.authenticate(secret))
    claims = jwt.decode(good, options={"verify_signature": False})
    head, body, signature = good.split(".")
    forged_body = base64.urlsafe_b64encode(json.dumps(claims | {"org_id": "bob"}).encode()).rstrip(b"=").decode()
    key = SIGNER.key("token")
    forged = {
        "another secret": Tokens(Signer(b"x" * 32), clock).issue(Caller("alice", 1, "")),
        "another purpose": jwt.encode(claims, SIGNER.key("download"), algorithm="HS256"),
        "another algorithm": jwt.encode(claims, key * 2, algorithm="HS512"),
        "no algorithm": _make_unsigned_token(claims),
        "another body": ".".join([head, forged_body, signature]),
        "no signature": f"{head}.{body}.",
        "another issuer": jwt.encode(claims | {"iss": "passport-else"}, key, algorithm="HS256"),
        "no expiry": jwt.encode({name: claims[name] for name in claims if name != "exp"}, key, algorithm="HS256"),
        "nonsense": "eyJ" + "x" * 100,
    }
    for name, token in forged.items():
        with pytest.raises(InvalidTokenError):
            tenants.authenticate(token)
            pytest.fail(name)
    assert tenants.authenticate(good).tenant_id == "alice"


# The routes.


def test_the_client_reads_the_owner_of_its_key(harness: Harness) -> None:
    owner = SelfApiKeyResponse.model_validate(harness.get("auth/apikey/me", BOB).json())
    assert owner.key_id == harness.services.tenants.authenticate(BOB).key_id
    assert owner.details.org_details.name == "bob"


def test_the_owner_of_a_key_is_local_without_keys(local: Harness) -> None:
    owner = SelfApiKeyResponse.model_validate(local.get("auth/apikey/me", "tml-any").json())
    assert (owner.key_id, owner.details.org_details.name) == (0, "local")


def test_a_token_has_its_keys_permissions(harness: Harness) -> None:
    session_id = harness.session()
    token = harness.ok("auth/token", {})["jwt"]
    assert harness.get(f"sessions/{session_id}", token).status_code == 200
    assert harness.get(f"sessions/{session_id}", harness.ok("auth/token", {}, BOB)["jwt"]).status_code == 404


def test_a_bad_token_and_a_bad_key_have_different_errors(harness: Harness) -> None:
    """The SDK exchanges its key again only after the error of a bad token."""
    answers = {key: harness.get("sessions", key) for key in ("eyJx", "tml-x")}
    assert [answer.status_code for answer in answers.values()] == [401, 401]
    assert 'error="invalid_token"' in answers["eyJx"].headers["WWW-Authenticate"]
    assert "WWW-Authenticate" not in answers["tml-x"].headers


def test_a_key_can_end_itself_and_no_other(harness: Harness) -> None:
    token = harness.ok("auth/token", {})["jwt"]
    assert harness.send("DELETE", "auth/apikey/me").status_code == 200
    for credential in (ALICE, token):
        assert harness.get("sessions", credential).status_code == 401
    assert harness.get("sessions", BOB).status_code == 200


def test_where_any_key_is_taken_none_can_be_ended(local: Harness) -> None:
    answer = local.send("DELETE", "auth/apikey/me")
    assert answer.status_code == 400
    assert "tinsmith keys create" in answer.json()["detail"]


def test_a_server_with_keys_answers_to_any_name(harness: Harness) -> None:
    answer = harness.client.get("/api/v1/healthz", headers={"Host": "tinker.example"})
    assert answer.status_code == 200


def test_a_server_answers_to_any_name_from_its_first_key_on(local: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def status() -> int:
        return local.client.get("/api/v1/healthz", headers={"Host": "tinker.example"}).status_code

    assert status() == 403
    clock = Clock(local.services.tenants._clock() + CACHE_S)
    monkeypatch.setattr(local.services.tenants, "_clock", clock)
    assert status() == 403
    local.services.tenants._keys.create("alice")
    clock.now += CACHE_S
    assert status() == 200
