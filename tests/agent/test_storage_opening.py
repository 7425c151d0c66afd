import asyncio
import os
from pathlib import Path

import pytest

from everstep_agent.storage import open_store, probe
from everstep_agent.storage.address import build_s3_config, file_uri, parse_uri
from everstep_agent.storage.errors import BadAddress, BucketMissing, Denied, Unreachable
from everstep_agent.storage.retrying import Patience
from everstep_lab import objectstore

ONCE = Patience(deadline_s=0.2)


def test_a_run_lies_below_its_uri() -> None:
    address = parse_uri("s3://bucket/team/a/", "default/byte-lm")
    assert (address.bucket, address.prefix) == ("bucket", "team/a/default/byte-lm")
    assert parse_uri("file:///data/runs", "r").uri == "file:///data/runs/r"
    assert parse_uri("file:///data/try%233").bucket == "/data/try#3"


def test_a_folder_may_have_any_bytes_in_its_name() -> None:
    path = os.fsdecode(b"/data/\xff?")
    address = parse_uri(file_uri(path), "r")
    assert (address.bucket, address.uri) == (path, "file:///data/%FF%3F/r")


@pytest.mark.parametrize(
    ("uri", "run", "named"),
    [
        ("", "r", "checkpoint.uri"),
        ("/data", "r", "it must begin with one of file://, s3://"),
        (
            "http://bucket/x",
            "r",
            "checkpoint.uri (in a command: --store, RUN or --to) 'http://bucket/x'",
        ),
        ("http://bucket/x", "r", "it must begin with one of"),
        ("s3:///prefix", "r", "names no bucket"),
        ("file://host/data", "r", "file:///absolute/path"),
        ("file://data", "r", "file:///absolute/path"),
        ("s3://b/p", "../other", "checkpoint.run"),
        ("s3://b/p", "a b", "checkpoint.run"),
        ("s3://b/../c", "r", "'..'"),
        ("s3://[x", "r", "s3://[x"),
        ("s3://b/p?region=eu", "r", "what follows ? or #"),
        ("file:///data/try#3", "r", "write %3F and %23"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(uri: str, run: str, named: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse_uri(uri, run)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAX:pa55word@bucket/x",
        "https://me:pa55word@host/x",
        "az://container/x?sv=1&sig=pa55word",
        "file://me:pa55word@host/data",
    ],
)
def test_keys_in_an_address_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse_uri(uri, "r")
    assert uri[:5] in str(caught.value)
    assert "pa55word" not in str(caught.value)


def test_a_password_in_an_endpoint_is_not_shown() -> None:
    with pytest.raises(BadAddress, match=r"host:9000.*write http") as caught:
        build_s3_config({"AWS_ENDPOINT_URL": "me:pa55word@host:9000"})
    assert "pa55word" not in str(caught.value)


def test_s3_settings_come_from_the_variables_that_s3_users_know() -> None:
    config, allow_http = build_s3_config(
        {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_SESSION_TOKEN": "session",
            "AWS_DEFAULT_REGION": "eu-west-1",
            "AWS_ENDPOINT_URL": "http://minio:9000",
        }
    )
    assert config == {
        "access_key_id": "id",
        "secret_access_key": "secret",
        "session_token": "session",
        "region": "eu-west-1",
        "endpoint": "http://minio:9000",
    }
    assert allow_http


def test_the_endpoint_of_the_service_wins_and_https_stays_https() -> None:
    config, allow_http = build_s3_config(
        {"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "https://s3.example"}
    )
    assert config == {"endpoint": "https://s3.example", "region": "us-east-1"}
    assert not allow_http


@pytest.mark.parametrize("half", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_key_pair_is_refused_by_name(half: str) -> None:
    with pytest.raises(BadAddress, match="is not set, but its other half is"):
        build_s3_config({half: "x"})


def test_settings_with_which_no_store_can_be_opened_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in os.environ if n.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(BadAddress, match=r"az://c/p.*set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://c/p", "", {})
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing"))
    with pytest.raises(BadAddress, match=r"gs://c/p.*correct GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://c/p", "", {})


def test_a_folder_whose_parent_is_missing_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadAddress, match="there is no folder"):
        open_store(f"file://{tmp_path}/not/there", "r", {})


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(BadAddress, match="store"):
        open_store(f"file://{tmp_path}/store", "r", {})
    with pytest.raises(BadAddress, match="/store is a file, not a folder; correct that, or"):
        open_store(f"file://{tmp_path}", "store", {})


@pytest.mark.parametrize("below", ["", "/a", "/a/b"])
@pytest.mark.parametrize("create", [True, False])
def test_a_link_that_leads_nowhere_is_named_with_its_target(
    tmp_path: Path, below: str, create: bool
) -> None:
    """As of a volume that is not mounted."""
    (tmp_path / "store").symlink_to("/no/volume")
    named = f"{tmp_path}/store is a link to /no/volume, which does not exist"
    with pytest.raises(BadAddress, match=named):
        open_store(f"file://{tmp_path}/store{below}", "run" if create else "", {}, create=create)


def test_a_reader_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadAddress, match="there is no folder"):
        open_store(f"file://{tmp_path}/store", "", {}, create=False)
    assert not (tmp_path / "store").exists()


async def test_a_missing_bucket_is_said_at_once(s3: objectstore.ObjectStore) -> None:
    store = open_store("s3://no-such-bucket/p", "r", s3.environment())
    with pytest.raises(BucketMissing, match=r"no-such-bucket.*does not exist; create it"):
        await probe(store)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
async def test_wrong_credentials_name_the_variable_and_show_no_secret(
    s3: objectstore.ObjectStore, name: str
) -> None:
    environ = s3.environment() | {name: "wrong-but-long-enough"}
    store = open_store(f"s3://{s3.bucket}/p", "r", environ)
    with pytest.raises(Denied) as caught:
        await probe(store)
    assert name in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (s3.secret_key, "wrong-but-long"))


async def test_a_server_that_is_not_there_is_unreachable_not_an_end(
    s3: objectstore.ObjectStore,
) -> None:
    environ = s3.environment() | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    store = open_store(f"s3://{s3.bucket}/p", "r", environ, patience=ONCE)
    with pytest.raises(Unreachable):
        await store.get("log/0")
    assert store.trouble is not None
    assert store.trouble.to_level().kind == "Unreachable"


async def test_a_server_that_comes_back_is_waited_for(
    s3: objectstore.ObjectStore, tmp_path: Path
) -> None:
    with objectstore.minio(tmp_path) as server:
        store = open_store(f"s3://{server.bucket}/p", "r", server.environment())
        await store.put("a", b"x")
        server.stop(kill=True)
        waiting = asyncio.create_task(store.get("a"))
        while store.trouble is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the store raises no event for its trouble
        server.start()
        assert await waiting == b"x"
        assert store.trouble is None
