"""Which tokens of an identity provider are valid, and what they say: one row for each rule."""

from __future__ import annotations

import base64
import functools
import hmac
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from coordinator.access.api_keys import KeyRing, Scope, new_key
from coordinator.access.tokens import (
    ALGORITHMS,
    KEYS_MAX,
    LEEWAY_S,
    TOKEN_CHARS_MAX,
    Reason,
    SigningKeys,
    TokenRefused,
    TokenRules,
    is_token,
    scopes_of,
)
from tests.coordinator.identity_providers import AUDIENCE, NONE, claims, jwk, private_key, signed

ISSUER = "https://login.example.com/realms/main"
RULES = TokenRules(ISSUER, AUDIENCE)
KINDS = {"RSA": "RSA", "P-256": "P-256", "P-384": "P-384", "Ed25519": "Ed25519"}


@functools.cache
def keys() -> SigningKeys:
    """One key of each kind, named after it, and one that is called `kid`."""
    return SigningKeys.parse({"keys": [*(jwk(kind, kind) for kind in KINDS), jwk("P-256", "kid")]})


def encoded(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def assembled(header: Any, payload: Any, sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    """A token that no library would make."""
    body = f"{encoded(header)}.{encoded(payload)}"
    return f"{body}.{encoded(sign(body.encode()))}"


def by_hmac(secret: bytes) -> str:
    return assembled(
        {"alg": "HS256", "typ": "JWT", "kid": "RSA"},
        claims(ISSUER),
        lambda body: hmac.digest(secret, body, "sha256"),
    )


def pem() -> bytes:
    public = private_key("RSA").public_key()
    return bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def changed(**changes: Any) -> str:
    return signed(claims(ISSUER, **changes))


def with_other_payload() -> str:
    head, _, signature = changed().split(".")
    return f"{head}.{encoded(claims(ISSUER, sub='ads'))}.{signature}"


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        *(("RSA", f"{family}{bits}") for family in ("RS", "PS") for bits in (256, 384, 512)),
        *(("P-256", "ES256"), ("P-384", "ES384"), ("Ed25519", "EdDSA")),
    ],
)
def test_each_asymmetric_algorithm_is_good(kind: str, algorithm: str) -> None:
    assert algorithm in ALGORITHMS
    verified = RULES.verify(signed(claims(ISSUER), kind, alg=algorithm, kid=kind), keys())
    assert (verified.tenant, verified.scopes) == ("search", frozenset({Scope.GENERATE}))


@pytest.mark.parametrize(
    ("claim", "make"),
    [
        ("aud", lambda: ["account", AUDIENCE]),
        ("nbf", lambda: time.time() - 5),
        ("nbf", lambda: time.time() + LEEWAY_S / 2),  # clocks differ
        ("exp", lambda: time.time() - LEEWAY_S / 2),
        ("exp", lambda: 1e300),
    ],
)
def test_a_token_is_good_within_its_times_and_for_any_of_its_audiences(claim: str, make: Callable[[], Any]) -> None:
    assert RULES.verify(changed(**{claim: make()}), keys()).tenant == "search"


REFUSED: dict[str, tuple[Reason, Callable[[], str]]] = {
    "expired": (Reason.EXPIRED, lambda: changed(exp=time.time() - LEEWAY_S - 5)),
    "without an end": (Reason.CLAIM, lambda: changed(exp=NONE)),
    "an end that is none": (Reason.MALFORMED, lambda: changed(exp="tomorrow")),
    "an end in text": (Reason.MALFORMED, lambda: changed(exp=str(int(time.time()) + 600))),
    "an infinite end": (Reason.MALFORMED, lambda: changed(exp=float("inf"))),
    "not valid yet": (Reason.NOT_YET_VALID, lambda: changed(nbf=time.time() + LEEWAY_S + 60)),
    "issued in the future": (Reason.NOT_YET_VALID, lambda: changed(iat=time.time() + LEEWAY_S + 60)),
    "another audience": (Reason.AUDIENCE, lambda: changed(aud="billing")),
    "part of the audience": (Reason.AUDIENCE, lambda: changed(aud=AUDIENCE[:-1])),
    "an audience of other case": (Reason.AUDIENCE, lambda: changed(aud=AUDIENCE.upper())),
    "no audience": (Reason.CLAIM, lambda: changed(aud=NONE)),
    "an audience that is none": (Reason.AUDIENCE, lambda: changed(aud={AUDIENCE: True})),
    "another issuer": (Reason.ISSUER, lambda: changed(iss="https://login.example.com/realms/other")),
    "a longer issuer": (Reason.ISSUER, lambda: changed(iss=ISSUER + "/")),
    "a list of issuers": (Reason.ISSUER, lambda: changed(iss=[ISSUER])),
    "no issuer": (Reason.CLAIM, lambda: changed(iss=NONE)),
    "an unknown key": (Reason.UNKNOWN_KEY, lambda: signed(claims(ISSUER), kid="other")),
    "no key named among several": (Reason.UNKNOWN_KEY, lambda: signed(claims(ISSUER), kid=NONE)),
    "signed by another key": (Reason.SIGNATURE, lambda: signed(claims(ISSUER), name="stranger")),
    "another payload": (Reason.SIGNATURE, with_other_payload),
    "no signature": (Reason.SIGNATURE, lambda: changed().rpartition(".")[0] + "."),
    "no algorithm": (Reason.ALGORITHM, lambda: assembled({"alg": "none", "kid": "kid"}, claims(ISSUER))),
    "no algorithm, spelled oddly": (Reason.ALGORITHM, lambda: assembled({"alg": "nOnE"}, claims(ISSUER))),
    "no algorithm named": (Reason.ALGORITHM, lambda: assembled({"kid": "kid"}, claims(ISSUER))),
    "a list of algorithms": (Reason.ALGORITHM, lambda: assembled({"alg": ["ES256"]}, claims(ISSUER))),
    "the public key as a secret": (Reason.ALGORITHM, lambda: by_hmac(pem())),
    "the public key as a secret, in JSON": (Reason.ALGORITHM, lambda: by_hmac(json.dumps(jwk("RSA", "RSA")).encode())),
    "an algorithm of another key": (Reason.ALGORITHM, lambda: signed(claims(ISSUER), kid="RSA")),
    "its own key in the header": (
        Reason.SIGNATURE,
        lambda: signed(claims(ISSUER), name="stranger", jwk=jwk("P-256", "kid", "stranger")),
    ),
    "an address of keys in the header": (
        Reason.UNKNOWN_KEY,
        lambda: signed(claims(ISSUER), name="stranger", kid="x", jku="http://127.0.0.1:1/keys"),
    ),
    "an extension that has to be understood": (
        Reason.MALFORMED,
        lambda: signed(claims(ISSUER), crit=["exp"], exp=1),
    ),
    "a payload that is elsewhere": (Reason.MALFORMED, lambda: signed(claims(ISSUER), crit=["b64"], b64=True)),
    "a token that ends a session": (Reason.MALFORMED, lambda: signed(claims(ISSUER), typ="logout+jwt")),
    "too long": (Reason.TOO_LONG, lambda: changed(groups=["x" * 40] * (TOKEN_CHARS_MAX // 40))),
    "no JSON in the header": (Reason.MALFORMED, lambda: f"{encoded(b'x')}.e30.AA"),
    "a list as header": (Reason.MALFORMED, lambda: assembled([], claims(ISSUER))),
    "a key named by a number": (Reason.MALFORMED, lambda: assembled({"alg": "ES256", "kid": 1}, claims(ISSUER))),
    "lists within lists": (Reason.MALFORMED, lambda: f"{encoded(b'[' * 5000)}.e30.AA"),
    "a tenant that is missing": (Reason.TENANT, lambda: changed(sub=NONE)),
    "a tenant of no characters": (Reason.TENANT, lambda: changed(sub="")),
    "a tenant that is too long": (Reason.TENANT, lambda: changed(sub="x" * 257)),
    "a tenant with a line break": (Reason.TENANT, lambda: changed(sub="a\nb")),
    "a tenant with half a character": (Reason.TENANT, lambda: changed(sub="\ud800")),
    "a tenant that is a number": (Reason.MALFORMED, lambda: changed(sub=7)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_token_is_refused_with_its_reason_and_without_itself(case: str) -> None:
    reason, make = REFUSED[case]
    token = make()
    with pytest.raises(TokenRefused) as caught:
        RULES.verify(token, keys())
    assert caught.value.reason is reason, caught.value.detail
    assert caught.value.__cause__ is None  # a traceback would quote it
    assert len(caught.value.detail) < 300
    assert caught.value.detail.isprintable()
    assert not any(part and part in caught.value.detail for part in token.split("."))


@given(st.one_of(
    st.text(), st.binary().map(lambda raw: raw.decode("latin-1")),
    st.tuples(st.binary(), st.binary(), st.binary()).map(lambda parts: ".".join(map(encoded, parts))),
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.dictionaries(
        st.sampled_from(["alg", "kid", "typ", "crit", "b64", "x"]), inner | st.lists(inner)), max_leaves=6,
    ).map(lambda header: assembled(header, {"sub": "search"})),
))  # fmt: skip
def test_nothing_but_a_refusal_comes_of_what_strangers_send(text: str) -> None:
    with pytest.raises(TokenRefused):
        RULES.verify(text, keys())


@given(st.dictionaries(
    st.sampled_from(["exp", "nbf", "iat", "aud", "iss", "sub", "scope", "scp", "roles", "jti"]),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4),
))  # fmt: skip
def test_nor_of_what_the_provider_signs(changes: dict[str, Any]) -> None:
    try:
        verified = RULES.verify(changed(**changes), keys())
    except TokenRefused:
        return
    assert verified.tenant == changes.get("sub", "search")
    assert verified.expires_s > time.time() - LEEWAY_S - 60


@pytest.mark.parametrize(
    ("claim", "payload", "tenant"),
    [
        ("sub", {"sub": "system:serviceaccount:ml:ranker"}, "system:serviceaccount:ml:ranker"),
        ("azp", {"azp": "ranking", "sub": "u1"}, "ranking"),
        ("https://example.com/tenant", {"https://example.com/tenant": "search"}, "search"),
        ("/kubernetes.io/namespace", {"kubernetes.io": {"namespace": "ml"}}, "ml"),
        ("/https:~1~1example.com~1x/a~0b", {"https://example.com/x": {"a~b": "search"}}, "search"),
        ("/kubernetes.io/namespace", {"kubernetes.io": "ml"}, None),
        ("/kubernetes.io", {"kubernetes.io": {"namespace": "ml"}}, None),
        ("/kubernetes.io/namespace", {}, None),
        ("groups", {"groups": ["search"]}, None),
        ("tenant", {"tenant": None}, None),
    ],
)
def test_the_operator_chooses_the_claim_of_the_tenant(claim: str, payload: dict[str, Any], tenant: str | None) -> None:
    rules = TokenRules(ISSUER, AUDIENCE, claim)
    if tenant is None:
        with pytest.raises(TokenRefused) as caught:
            rules.verify(changed(**payload), keys())
        assert caught.value.reason is Reason.TENANT
    else:
        assert rules.verify(changed(**payload), keys()).tenant == tenant


PROVIDERS: dict[str, tuple[str, dict[str, Any], str, set[Scope]]] = {
    "Keycloak": (
        "azp",
        {"azp": "ranking", "aud": [AUDIENCE, "account"], "typ": "Bearer", "scope": "email outrider:generate profile"},
        "ranking",
        {Scope.GENERATE},
    ),
    "Entra, a user": ("oid", {"oid": "6e7e-1", "tid": "72f9", "scp": "outrider:generate"}, "6e7e-1", {Scope.GENERATE}),
    "Entra, an application": ("azp", {"azp": "15cb", "roles": ["outrider:generate"]}, "15cb", {Scope.GENERATE}),
    "Google": ("hd", {"hd": "example.com", "email_verified": True, "scope": NONE}, "example.com", set()),
    "Kubernetes": (
        "/kubernetes.io/namespace",
        {
            "aud": [AUDIENCE],
            "sub": "system:serviceaccount:ml:ranker",
            "kubernetes.io": {"namespace": "ml", "pod": {"name": "ranker-0"}, "serviceaccount": {"name": "ranker"}},
            "scope": NONE,
        },
        "ml",
        set(),
    ),
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_tokens_of_the_providers_in_the_documents_are_good(name: str) -> None:
    claim, payload, tenant, scopes = PROVIDERS[name]
    verified = TokenRules(ISSUER, AUDIENCE, claim).verify(changed(**payload), keys())
    assert (verified.tenant, verified.scopes) == (tenant, frozenset(scopes))


def test_the_file_of_the_documents_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations" / "security.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    limits = KeyRing.parse(example).limits_of("system:serviceaccount:ml:ranker")
    assert (limits.token_scopes, limits.tokens_per_minute) == (frozenset({Scope.GENERATE}), 200000)


@pytest.mark.parametrize(
    ("payload", "scopes"),
    [
        ({"scope": "openid outrider:generate email"}, {Scope.GENERATE}),
        ({"scp": "outrider:generate outrider:metrics"}, {Scope.GENERATE, Scope.METRICS}),
        ({"scp": ["outrider:metrics"]}, {Scope.METRICS}),
        ({"roles": ["outrider:generate"]}, {Scope.GENERATE}),
        ({"scope": "outrider:metrics", "roles": ["outrider:generate"]}, {Scope.GENERATE, Scope.METRICS}),
        ({}, set()),
        ({"scope": "generate"}, set()),
        ({"scope": "outrider:generated"}, set()),
        ({"scope": "OUTRIDER:GENERATE"}, set()),
        ({"scope": {"outrider:generate": True}}, set()),
        ({"scp": [["outrider:generate"], 7, None]}, set()),
        ({"roles": 7}, set()),
    ],
)
def test_scopes_have_a_prefix_and_others_are_ignored(payload: dict[str, Any], scopes: set[Scope]) -> None:
    assert scopes_of(payload) == scopes


UNUSABLE: dict[str, Callable[[], Any]] = {
    "a secret": lambda: {"kty": "oct", "kid": "kid", "k": "c2VjcmV0"},
    "too short": lambda: jwk("weak RSA", "kid"),
    "of another curve": lambda: jwk("P-521", "kid"),
    "for encryption": lambda: jwk("P-256", "kid", use="enc"),
    "for other operations": lambda: jwk("P-256", "kid", key_ops=["encrypt"]),
    "for the algorithm of another curve": lambda: jwk("P-256", "kid", alg="ES384"),
    "for an algorithm of encryption": lambda: jwk("RSA", "kid", alg="RSA-OAEP"),
    "no point of its curve": lambda: jwk("P-256", "kid", x="AA"),
    "named by a number": lambda: jwk("P-256", None) | {"kid": 7},
    "empty": dict,
    "text": lambda: "key",
    "nothing": lambda: None,
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_key_that_is_for_something_else_or_weak_is_left_out(case: str) -> None:
    entry = UNUSABLE[case]()
    with pytest.raises(ValueError, match="no key for a permitted"):
        SigningKeys.parse({"keys": [entry]})
    assert len(SigningKeys.parse({"keys": [entry, jwk("P-256", "kid")]})) == 1


@pytest.mark.parametrize("document", [None, [], {}, {"keys": {}}, {"keys": []}, {"keys": None}, "keys", 7])
def test_a_set_that_is_none_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="the key set has no"):
        SigningKeys.parse(document)


def test_a_key_that_names_its_algorithm_is_for_no_other() -> None:
    known = SigningKeys.parse({"keys": [jwk("RSA", "kid", alg="RS256")]})
    assert RULES.verify(signed(claims(ISSUER), "RSA", alg="RS256"), known)
    with pytest.raises(TokenRefused, match="its key is not for PS256"):
        RULES.verify(signed(claims(ISSUER), "RSA", alg="PS256"), known)


def test_a_token_need_not_name_the_only_key() -> None:
    known = SigningKeys.parse({"keys": [jwk("P-256", "kid"), jwk("RSA", "other")]})
    assert RULES.verify(signed(claims(ISSUER), kid=NONE), known)


def test_a_set_without_end_is_cut() -> None:
    entries = [jwk("P-256", f"kid {number}") for number in range(KEYS_MAX + 10)]
    assert len(SigningKeys.parse({"keys": entries})) == KEYS_MAX


def test_what_looks_like_a_token_is_no_key() -> None:
    assert is_token(changed())
    assert is_token(assembled({"alg": "none"}, {}))
    for other in (new_key(), "", ".", "a.b", "a..c", "a.b.c.d", "a.b.c=", "ä.b.c", "a.b.c\n", "a b.c.d", " a.b.c"):
        assert not is_token(other)
