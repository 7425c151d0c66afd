"""Single requests to a faulty store: their outcome and message."""

import asyncio
from collections.abc import Callable

import pytest

from agent.a_run import claim, commit
from everstep_agent.runlog.run_log import Appended, Lost, RunLog
from everstep_agent.storage import errors, obstore_store, open_store, probe
from everstep_agent.storage.retrying import Patience
from everstep_lab import objectstore
from store import proxy as bad
from store.given import QUICK, a_store
from store.proxy import Act, S3Proxy

ONCE = Patience(deadline_s=3.0, longest_s=3.0)


async def test_the_proxy_changes_nothing_by_itself(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    store = a_store(s3, proxy)
    assert await probe(store) == []
    body = bytes(range(256)) * 4096
    await store.put("chunks/large", body)
    assert await store.get("chunks/large") == body
    assert await store.list() == ["chunks/large"]
    await store.delete("chunks/large")
    assert await store.list() == []


@pytest.mark.parametrize(
    "act",
    [
        bad.refuse(503, "SlowDown"),
        bad.refuse(429, "TooManyRequests"),
        bad.refuse(500, "InternalError"),
        bad.lose_answer(),
        bad.lose_answer(504, "GatewayTimeout"),
        bad.drop(),
        bad.drop(0.5),
    ],
    ids=["503", "429", "500", "applied-500", "applied-504", "reset", "cut-in-the-body"],
)
async def test_a_storm_is_sat_out_by_every_verb(
    s3: objectstore.ObjectStore, proxy: S3Proxy, act: Act
) -> None:
    store = a_store(s3, proxy, Patience(deadline_s=60.0, first_s=0.01, longest_s=0.1))
    for verb in ("PUT", "GET", "DELETE"):
        proxy.arm(act, verb, times=3)
    await store.put("chunks/a", b"x" * 1000)
    assert await store.get("chunks/a") == b"x" * 1000
    await store.delete("chunks/a")
    proxy.arm(act, "GET", target="list-type", times=2)
    assert await store.list() == []
    assert store.trouble is None


async def test_a_store_that_takes_two_at_a_time_is_asked_for_less_until_it_takes_more(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    narrow = proxy.arm(bad.serve_at_most(2), "PUT")
    store = a_store(s3, proxy, Patience(deadline_s=60.0, first_s=0.01, longest_s=0.1))
    body = b"x" * 10_000
    await asyncio.gather(*(store.put(f"chunks/{i}", body) for i in range(100)))
    assert len(await store.list("chunks")) == 100
    assert narrow.hits < 150, "of 100 bodies, half or more were sent again"
    proxy.mend()
    await asyncio.gather(*(store.put(f"chunks/{i}", body) for i in range(100)))
    assert store.trouble is None


async def test_a_create_that_was_applied_though_500_came_back_is_recognised_in_the_log(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    log = RunLog(a_store(s3, proxy))
    proxy.arm(bad.lose_answer(), "PUT", times=1)
    assert await log.append(claim(1)) == Appended(place=0, answer_lost=True)
    proxy.arm(bad.refuse(409, "ConditionalRequestConflict"), "PUT", times=2)
    assert await log.append(commit(1, 5)) == Appended(place=1)


async def test_a_place_that_a_rival_took_behind_a_lost_answer_is_the_rivals(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    store = a_store(s3, proxy)
    ours, rival = RunLog(store), RunLog(store)
    await ours.append(claim(1))
    await rival.refresh()
    proxy.arm(bad.refuse(500, "InternalError"), "PUT", times=1)
    await rival.append(claim(2, token="rival"))
    lost = await ours.append(commit(1, 5))
    assert isinstance(lost, Lost)
    assert (lost.reason, lost.entries) == ("PlaceTaken", (claim(2, token="rival"),))


@pytest.mark.parametrize("after_head", [False, True], ids=["before-the-head", "after-the-head"])
async def test_a_server_that_hangs_is_asked_anew(
    s3: objectstore.ObjectStore,
    proxy: S3Proxy,
    monkeypatch: pytest.MonkeyPatch,
    after_head: bool,
) -> None:
    store = a_store(s3, proxy, Patience(deadline_s=60.0, first_s=0.01))
    await store.put("chunks/a", b"x" * 1000)
    monkeypatch.setattr(obstore_store, "STALL_SECONDS", 0.5)
    fault = proxy.arm(bad.hang(after_head), "GET", times=1)
    assert await store.get("chunks/a") == b"x" * 1000
    assert fault.hits == 1


async def test_a_list_that_hangs_is_asked_for_anew(
    s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(s3, proxy, Patience(deadline_s=60.0, first_s=0.01))
    await store.put("chunks/a", b"x")
    monkeypatch.setattr(obstore_store, "STALL_SECONDS", 0.5)
    fault = proxy.arm(bad.hang(False), "GET", times=1)
    async with asyncio.timeout(30):  # without its own limit a request takes 60 s
        assert await store.list("chunks/") == ["chunks/a"]
    assert fault.hits == 1


async def test_a_server_that_hangs_for_good_is_named(
    s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_store, "STALL_SECONDS", 0.2)
    proxy.arm(bad.hang(False))
    for call in (a_store(s3, proxy, ONCE).get("a"), a_store(s3, proxy, ONCE).create("a", b"")):
        with pytest.raises(errors.Unreachable, match=r"did not complete|does not answer"):
            await call


@pytest.mark.parametrize(
    ("answer", "kind", "fix"),
    [
        ((400, "ExpiredToken"), errors.Denied, "AWS_SESSION_TOKEN has expired"),
        ((400, "InvalidToken"), errors.Denied, "AWS_SESSION_TOKEN does not belong"),
        ((403, "InvalidAccessKeyId"), errors.Denied, "correct the Secret"),
        ((403, "SignatureDoesNotMatch"), errors.Denied, "correct the Secret"),
        ((403, "RequestTimeTooSkewed"), errors.Unreachable, "clock differs from the store's"),
        ((403, "AccessDenied"), errors.Denied, "needs to read, write, delete and list"),
        ((404, "NoSuchBucket"), errors.BucketMissing, "create it or correct checkpoint.uri"),
        ((301, "PermanentRedirect"), errors.StoreError, "set AWS_REGION"),
        ((507, "XMinioStorageFull"), errors.NoSpace, "make room"),
        ((400, "XMinioAdminBucketQuotaExceeded"), errors.NoSpace, "make room"),
    ],
    ids=lambda v: v[1] if isinstance(v, tuple) else "",
)
async def test_what_the_store_refuses_is_said_with_the_fix(
    s3: objectstore.ObjectStore,
    proxy: S3Proxy,
    answer: tuple[int, str],
    kind: type[errors.StoreError],
    fix: str,
) -> None:
    proxy.arm(bad.refuse(*answer))
    with pytest.raises(kind) as caught:
        await a_store(s3, proxy, ONCE).create("log/0", b"x")
    assert type(caught.value) is kind
    assert fix in str(caught.value)
    assert f"s3://{s3.bucket}/p" in str(caught.value)


async def test_an_object_that_none_of_us_wrote_is_not_brought_into_memory(
    s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(s3, proxy)
    await store.put("chunks/a", b"x" * 1001)
    monkeypatch.setattr(obstore_store, "LIMIT_BYTES", 1000)
    with pytest.raises(errors.TooLarge, match="has 1001 bytes"):
        await store.get("chunks/a")


async def test_a_body_that_was_changed_on_its_way_is_refused_by_its_signature_and_sent_again(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    store = a_store(s3, proxy)
    proxy.arm(bad.store_other(lambda body: body[:-1] + b"?"), "PUT", times=1)
    with pytest.raises(errors.StoreError, match=r"(?i)sha256|checksum"):
        await store.put("chunks/a", b"hello")
    await store.put("chunks/a", b"hello")
    assert await store.get("chunks/a") == b"hello"


# --- create-only PUT, on which the log relies


@pytest.mark.parametrize("gateway", [bad.ignore_condition, bad.look_then_put])
async def test_a_store_whose_create_only_put_is_none_is_refused_at_the_start(
    s3: objectstore.ObjectStore, proxy: S3Proxy, gateway: Callable[[bad.Put], Act]
) -> None:
    past = open_store(f"s3://{s3.bucket}", "", s3.environment())

    async def put(target: str, body: bytes) -> None:
        await past.put(target.removeprefix(f"/{s3.bucket}/"), body)

    proxy.arm(gateway(put), "PUT")
    with pytest.raises(errors.NoAtomicCreate, match=r"create-only PUT.*is atomic, as in AWS S3"):
        await probe(a_store(s3, proxy))


async def test_the_probe_believes_a_store_that_is_only_slow_and_forgetful(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    proxy.arm(bad.lose_answer(), "PUT", chance=0.5)
    proxy.arm(bad.refuse(503, "SlowDown"), chance=0.3)
    store = a_store(s3, proxy, Patience(deadline_s=60.0, first_s=0.01, longest_s=0.1))
    assert await probe(store) == []


async def test_a_listing_from_before_hides_nothing_from_the_log(
    s3: objectstore.ObjectStore, proxy: S3Proxy
) -> None:
    store = a_store(s3, proxy, QUICK)
    log = RunLog(store)
    await log.append(claim(1))
    before = b""

    def keep(body: bytes) -> bytes:
        nonlocal before
        before = before or body
        return before

    proxy.arm(bad.change(keep), "GET", target="list-type")
    assert await store.list("log") == ["log/000000000000.json"]
    await log.append(commit(1, 5))
    assert await store.list("log") == ["log/000000000000.json"]
    reader = RunLog(store)
    await asyncio.gather(reader.refresh(), log.check_whole())
    assert reader.entries == log.entries
    await reader.check_whole()
