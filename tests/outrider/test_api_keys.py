"""API keys: what the file may say, whose key a key is, and what happens when the file changes."""

from __future__ import annotations

import datetime
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.access import api_keys
from coordinator.access.api_keys import ANYBODY, KeyFile, KeyRing, Scope, digest, entry, new_key
from outrider.errors import ConfigurationError, Forbidden, Unauthenticated, Unavailable
from outrider.security import watched_files

NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)
GENERATE = frozenset({Scope.GENERATE})


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(watched_files, "SETTLED_S", 0.0)


def degraded(file: KeyFile) -> bool:
    return file.is_degraded


class TestRing:
    def test_a_key_names_its_tenant_its_scopes_and_its_limits(self) -> None:
        key = new_key()
        ring = KeyRing.parse(
            "[tenants.search]\nrequests_per_minute = 60\n\n" + entry(key, "search", GENERATE, None, "ranking")
        )
        caller = ring.find(key, NOW)
        assert (caller.tenant, caller.scopes) == ("search", GENERATE)
        assert (caller.limits.requests_per_minute, caller.limits.tokens_per_minute) == (60, None)

    @pytest.mark.parametrize("limit", ["0", "0.5", "-1", "inf", "nan"])
    def test_a_limit_that_would_refuse_for_ever_is_none(self, limit: str) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            with pytest.raises(ValueError, match=name):
                KeyRing.parse(f"[tenants.search]\n{name} = {limit}\n")
        assert KeyRing.parse("[tenants.search]\nrequests_per_minute = 1\n") is not None

    @pytest.mark.parametrize("limit", ["0", "-1", "1.5", "inf"])
    def test_a_number_of_sequences_that_would_refuse_for_ever_or_is_none_is_not_taken(self, limit: str) -> None:
        with pytest.raises(ValueError, match="max_concurrent_sequences"):
            KeyRing.parse(f"[tenants.search]\nmax_concurrent_sequences = {limit}\n")

    def test_a_key_shares_prefixes_where_it_says_so_and_its_tenant_may_have_so_many_sequences(self) -> None:
        private, sharing = new_key(), new_key()
        ring = KeyRing.parse(
            "[tenants.search]\nmax_concurrent_sequences = 8\n\n"
            + entry(private, "search", GENERATE, None, "")
            + entry(sharing, "search", GENERATE, None, "", shares_prefixes=True)
        )
        assert [ring.find(key, NOW).shares_prefixes for key in (private, sharing)] == [False, True]
        assert ring.find(private, NOW).limits.max_concurrent_sequences == 8
        with pytest.raises(ValueError, match="shares_prefixes"):
            KeyRing.parse(entry(private, "search", GENERATE, None, "") + 'shares_prefixes = "all"\n')

    def test_nobody_is_given_less_urgency_than_anybody_has(self) -> None:
        with pytest.raises(ValueError, match="priority_min"):
            KeyRing.parse("[tenants.search]\npriority_min = 1\n")

    def test_the_file_holds_nothing_that_a_key_could_be_made_from(self) -> None:
        key = new_key()
        text = entry(key, "search", GENERATE, None, "")
        assert key not in text
        assert digest(key) in text

    def test_keys_have_256_random_bits(self) -> None:
        keys = {new_key() for _ in range(100)}
        assert len(keys) == 100
        assert all(len(key) >= len("or-") + 43 for key in keys)

    @pytest.mark.parametrize("other", ["", "or-", "x", "\x00", "é" * 20, "x" * 100_000])
    def test_what_is_not_in_the_file_is_nobodys(self, other: str) -> None:
        key = new_key()
        ring = KeyRing.parse(entry(key, "search", GENERATE, None, ""))
        for token in (other, key[:-1], key + "x", key.upper(), digest(key)):
            with pytest.raises(Unauthenticated, match="not known"):
                ring.find(token, NOW)

    def test_a_key_expires(self) -> None:
        key = new_key()
        ring = KeyRing.parse(entry(key, "search", GENERATE, NOW, ""))
        ring.find(key, NOW - datetime.timedelta(seconds=1))
        with pytest.raises(Unauthenticated, match="expired at 2026-11-22"):
            ring.find(key, NOW)

    def test_a_scope_that_is_missing_is_named(self) -> None:
        key = new_key()
        caller = KeyRing.parse(entry(key, "search", frozenset({Scope.METRICS}), None, "")).find(key, NOW)
        caller.check(Scope.METRICS)
        with pytest.raises(Forbidden, match="not good for generate; its scopes are metrics"):
            caller.check(Scope.GENERATE)

    def test_without_keys_everybody_may_do_everything(self) -> None:
        for scope in Scope:
            ANYBODY.check(scope)

    @given(
        tenant=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50),
        note=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
        scopes=st.frozensets(st.sampled_from(Scope)),
    )
    def test_whatever_the_names_an_entry_is_read_as_it_was_written(
        self, tenant: str, note: str, scopes: frozenset[Scope]
    ) -> None:
        key = new_key()
        try:
            text = entry(key, tenant, scopes, NOW + datetime.timedelta(days=1), note)
        except ValueError:  # TOML has no way to write it
            assert any(character not in string.printable for character in tenant + note)
            return
        caller = KeyRing.parse(text).find(key, NOW)
        assert (caller.tenant, caller.scopes) == (tenant, scopes)

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("[[keys]]\ntenant = 'a'", "sha256"),
            ("[[keys]]\ntenant = 'a'\nsha256 = 'or-secret'", "sha256"),
            ("[[keys]]\nsha256 = '" + "0" * 64 + "'", "tenant"),
            ("[[keys]]\ntenant = 'a'\nsha256 = '" + "0" * 64 + "'\nscopes = ['root']", "scopes"),
            ("[[keys]]\ntenant = 'a'\nsha256 = '" + "0" * 64 + "'\nexpires = 2027-01-01T00:00:00", "expires"),
            ("[[keys]]\ntenant = 'a'\nsha256 = '" + "0" * 64 + "'\nadmin = true", "admin"),
            (("[[keys]]\ntenant = 'a'\nsha256 = '" + "0" * 64 + "'\n") * 2, "twice"),
            ("[tenants.a]\nrequests_per_minute = 0", "requests_per_minute"),
            ("[tenants.a]\nrequest_per_minute = 5", "request_per_minute"),
            ("key = 'or-secret'", "key"),
            ("[[keys", "at"),
        ],
    )
    def test_a_file_that_is_not_understood_is_refused_and_quotes_no_secret(self, text: str, complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint) as caught:
            KeyRing.parse(text)
        assert "or-secret" not in str(caught.value)


class TestFile:
    def test_a_change_is_in_force_at_once_and_a_bad_one_is_not(self, tmp_path: Path) -> None:
        path, first, second = tmp_path / "keys.toml", new_key(), new_key()
        path.write_text(entry(first, "a", GENERATE, None, ""))
        file = KeyFile(path)
        assert file.authenticate(f"Bearer {first}").tenant == "a"
        path.write_text(entry(second, "b", GENERATE, None, ""))
        assert file.authenticate(f"bearer {second}").tenant == "b"
        with pytest.raises(Unauthenticated):
            file.authenticate(f"Bearer {first}")  # revoked
        path.write_text("[[keys")
        assert file.authenticate(f"Bearer {second}").tenant == "b"
        path.unlink()
        assert file.authenticate(f"Bearer {second}").tenant == "b"

    SLIPS = (
        ("expires = 2027-01-01T00:00:00Z", "expires = 2027-13-01T00:00:00Z"),  # no such month: not TOML
        ("expires = ", "expires "),
        ('tenant = "b"', 'tenant = "b'),
        ("[[keys]]", "[[keys]"),
        ('scopes = ["generate"]', 'scopes = ["everything"]'),  # TOML, and no such scope
        ('tenant = "b"', 'tenent = "b"'),
    )

    @pytest.mark.parametrize(("right", "wrong"), SLIPS)
    def test_a_slip_closes_the_key_of_its_entry_and_no_other(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, right: str, wrong: str
    ) -> None:
        path, keys = tmp_path / "keys.toml", {tenant: new_key() for tenant in "abc"}
        end = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
        entries = {tenant: entry(key, tenant, GENERATE, end, "") for tenant, key in keys.items()}
        path.write_text("\n".join(entries.values()))
        file = KeyFile(path)
        assert file.authenticate(f"Bearer {keys['b']}").tenant == "b"
        assert not degraded(file)
        assert right in entries["b"]
        path.write_text("\n".join([entries["a"], entries["b"].replace(right, wrong), entries["c"]]))
        with pytest.raises(Unauthenticated):
            file.authenticate(f"Bearer {keys['b']}")
        assert [file.authenticate(f"Bearer {keys[each]}").tenant for each in "ac"] == ["a", "c"]
        assert degraded(file)
        assert "has damage" in caplog.text
        path.write_text("\n".join(entries.values()))
        assert file.authenticate(f"Bearer {keys['b']}").tenant == "b"
        assert not degraded(file)

    @pytest.mark.parametrize("slip", ["[[keys", "[tenants", "tenant = ", '[[keys]]\ntenant = "x"\n', "[key]\n"])
    def test_a_key_that_is_taken_out_is_closed_though_the_file_has_a_slip_elsewhere(
        self, tmp_path: Path, slip: str
    ) -> None:
        path, stays, revoked = tmp_path / "keys.toml", new_key(), new_key()
        both = [entry(stays, "a", GENERATE, None, ""), entry(revoked, "b", GENERATE, None, "")]
        path.write_text("\n".join(both))
        file = KeyFile(path)
        path.write_text(f"{both[0]}\n[tenants.c]\n{slip}")
        with pytest.raises(Unauthenticated):
            file.authenticate(f"Bearer {revoked}")
        assert file.authenticate(f"Bearer {stays}").tenant == "a"

    def test_a_key_that_two_entries_claim_is_nobodys(self, tmp_path: Path) -> None:
        path, first, second = tmp_path / "keys.toml", new_key(), new_key()
        path.write_text(entry(first, "a", GENERATE, None, "") + entry(second, "b", GENERATE, None, ""))
        file = KeyFile(path)
        path.write_text(path.read_text() + entry(second, "c", GENERATE, NOW, ""))
        with pytest.raises(Unauthenticated):
            file.authenticate(f"Bearer {second}")
        assert file.authenticate(f"Bearer {first}").tenant == "a"

    @pytest.mark.parametrize(
        "slip", ["requests_per_minute = sixty", "requests_per_minute = 0", "request_per_minute = 6"]
    )
    def test_limits_that_cannot_be_read_stay_as_they_were_and_nobody_new_is_without(
        self, tmp_path: Path, slip: str
    ) -> None:
        path, known, new, other = tmp_path / "keys.toml", new_key(), new_key(), new_key()
        before = "[tenants.a]\nrequests_per_minute = 60\n\n" + entry(known, "a", GENERATE, None, "")
        path.write_text(before)
        file = KeyFile(path)
        added = entry(new, "new", GENERATE, None, "") + entry(other, "a", GENERATE, None, "")
        path.write_text(f"[tenants.a]\n{slip}\n[tenants.new]\n{slip}\n" + before.partition("\n\n")[2] + added)
        for key in (known, other):
            assert file.authenticate(f"Bearer {key}").limits.requests_per_minute == 60
        with pytest.raises(Unauthenticated):
            file.authenticate(f"Bearer {new}")

    @pytest.mark.parametrize("contents", [None, b"[[keys", b"\xff\xfe", b"not a file of keys"])
    def test_keys_outlive_their_file_for_a_bounded_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: bytes | None
    ) -> None:
        path, key = tmp_path / "keys.toml", new_key()
        path.write_text(entry(key, "a", GENERATE, None, ""))
        file, header = KeyFile(path), f"Bearer {key}"
        if contents is None:
            path.unlink()
        else:
            path.write_bytes(contents)
        assert file.authenticate(header).tenant == "a"
        assert degraded(file)
        monkeypatch.setattr(api_keys, "GRACE_S", 0.0)
        with pytest.raises(Unavailable, match="cannot be read"):
            file.authenticate(header)
        path.write_text(entry(key, "a", GENERATE, None, ""))
        assert file.authenticate(header).tenant == "a"
        assert not degraded(file)

    def test_damage_quotes_no_secret(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path, key = tmp_path / "keys.toml", new_key()
        path.write_text(entry(key, "a", GENERATE, None, ""))
        file = KeyFile(path)
        path.write_text(path.read_text() + '[[keys]]\ntenant = "b"\nsha256 = "or-secret"\n')
        assert file.authenticate(f"Bearer {key}").tenant == "a"
        path.write_text(path.read_text() + "[[keys]]\nsha256 = or-secret\n")
        assert file.authenticate(f"Bearer {key}").tenant == "a"
        assert "sha256" in caplog.text
        assert "or-secret" not in caplog.text

    def test_no_process_starts_on_a_file_with_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(entry(new_key(), "a", GENERATE, None, "") + "[[keys]]\ntenant = 'b'\n")
        with pytest.raises(ConfigurationError, match="sha256"):
            KeyFile(path)

    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "KEY"])
    def test_a_header_without_a_key_is_told_what_to_say(self, tmp_path: Path, header: str | None) -> None:
        path, key = tmp_path / "keys.toml", new_key()
        path.write_text(entry(key, "a", GENERATE, None, ""))
        with pytest.raises(Unauthenticated, match="Bearer KEY"):
            KeyFile(path).authenticate(key if header == "KEY" else header)

    def test_a_file_that_is_missing_is_named_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"none\.toml cannot be read"):
            KeyFile(tmp_path / "none.toml")

    def test_no_keys_at_all_let_nobody_in(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        path.touch()
        with pytest.raises(Unauthenticated):
            KeyFile(path).authenticate(f"Bearer {new_key()}")
