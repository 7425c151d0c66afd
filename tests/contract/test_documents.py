"""Encoding and decoding changes no document that processes exchange."""

import json
from typing import Any

import pytest

from everstep_contract import codec, env, ledger, levels, log, manifest, names, report, wire
from everstep_contract.log import ChainLink, Claim, Commit, Done, LeftOut, MemberId, Retire
from everstep_contract.units import ONE_RANK, Mesh

MEMBER = MemberId(slot=1, attempt=2, incarnation=3, rank=4, life=5)
ENTRIES: list[log.Entry] = [
    Claim(
        epoch=3,
        token="t",
        members=(MEMBER,),
        coordinator="10.0.0.1:7070",
        job_uid="u",
        job="ns/j",
        chain=(ChainLink(epoch=1, last_step=7),),
        left_out=(LeftOut(slot=0, attempt=0, why="gone"),),
        cause="UserError",
        failed=8,
        fault="ValueError at train.py:12",
        incident="i",
    ),
    Commit(epoch=3, token="t", step=9, manifest="manifests/x.json", digest="d", bytes=5),
    Retire(epoch=3, token="t", manifests=("m",), chunks=("c1", "c2")),
    Done(epoch=3, token="t", step=9),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: type(e).__name__)
def test_log_entries(entry: log.Entry) -> None:
    raw = log.encode(entry)
    assert log.decode(raw) == entry
    assert json.loads(raw)["kind"] == type(entry).__name__.lower()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"kind":"x"}', b'{"kind":"done"}', b"\xff"])
def test_what_is_no_log_entry_is_refused(raw: bytes) -> None:
    with pytest.raises(codec.DecodeError, match="log entry"):
        log.decode(raw)


def test_places_sort_as_they_count() -> None:
    keys = [log.key(n) for n in (0, 9, 10, 99, 100, 10**11)]
    assert keys == sorted(keys)
    assert [log.place_of(k) for k in keys] == [0, 9, 10, 99, 100, 10**11]


WANTED = levels.Wanted(
    generation=2,
    revision=7,
    peers=(levels.Peer(slot=0, attempt=1, address="127.0.0.1:1"),),
    leave=(2,),
    dead=(levels.DeadAgent(slot=0, attempt=0, incarnation=1),),
    gone=(levels.SlotAttempt(slot=1, attempt=0),),
    watched=(0, 1),
    judged=("1.0.1.0.2",),
    stop=levels.Stop.SUSPEND,
    hazard_per_hour={0: 0.5},
)
SEEN = levels.Seen(
    run="ns/j",
    epoch=2,
    running=True,
    coordinator=levels.SlotAttempt(slot=0, attempt=0),
    members=(levels.Member(slot=0, attempt=0, incarnation=0, rank=0, life=0),),
    committed=levels.CheckpointRef(epoch=1, step=5, bytes=1, age_ms=2),
    left=(levels.Left(slot=0, attempt=0, epoch=1, step=5),),
    device_deaths=(
        levels.DeviceDeath(id="1.0.1.0.2", slot=1, attempt=0, message="ECC", age_ms=40),
    ),
    stuck=(levels.StuckPod(slot=0, attempt=1, message="pid 7 outlives SIGKILL"),),
    stopped=levels.Stopped(epoch=1, step=5),
    failure=levels.Failure(cause="UserError", message="m", rank=1, step=2),
    restarts={"WorkerDied": 1},
    incidents=(
        levels.RuntimeIncident(
            id="i", cause="Leave", message="m", phases=(levels.Phase(name="save", ms=3),)
        ),
    ),
    storage_error=levels.StorageError(kind="Unreachable", message="m"),
    seconds={"step": 1.5},
)


@pytest.mark.parametrize("level", [WANTED, SEEN, levels.Wanted(), levels.Seen()])
def test_levels(level: Any) -> None:
    assert codec.loads(type(level), codec.dumps(level)) == level


FRAMES: list[Any] = [
    wire.Start(
        epoch=1, rank=0, world=2, local_rank=0, local_world=1, node_rank=0, job="j", run="r",
        applied=3, manifest="/m", places="/p", staging="/s",
    ),
    wire.Staged(
        epoch=1, step=2, path="/p", lead=True, state={"a": [1, None, {"$tensor": "w"}]},
        tensors=(
            wire.StagedTensor(
                name="w", dtype="float32", shape=(2, 3), offsets=(0, 0), lengths=(2, 3), at=0
            ),
        ),
    ),
    wire.Applied(epoch=1, step=2, loss=None, grad_norm=0.5, notes=("n",)),
    wire.StoreReply(value=wire.to_text(b"\0\xff"), number=3),
    wire.StoreCheck(epoch=1, keys=("a", "b")),
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=lambda f: type(f).__name__)
def test_frames(frame: Any) -> None:
    raw = wire.encode(frame, 7)
    (length,) = wire.LENGTH.unpack(raw[: wire.LENGTH.size])
    body = raw[wire.LENGTH.size :]
    assert length == len(body)
    assert wire.decode(body) == wire.Envelope(frame=frame, id=7)


def test_every_frame_has_a_name_of_its_own() -> None:
    assert len({cls.__name__ for cls in wire.FRAMES}) == len(wire.FRAMES)


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[]",
        b"{}",
        b'{"type":"Gossip","body":{}}',
        b'{"type":"Exit"}',
        b'{"type":"Exit","id":"x","body":{}}',
        b'{"type":"Exit","id":1e999,"body":{}}',
        b"[" * 100_000,
    ],
    ids=range(8),
)
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(codec.DecodeError, match="wire: not a frame"):
        wire.decode(body)


def test_bytes_on_the_wire() -> None:
    assert wire.from_text(wire.to_text(bytes(range(256)))) == bytes(range(256))


def test_ledger_lines() -> None:
    entries = [
        ledger.LedgerEntry(
            epoch=1, step=s, samples=(s,), counts=(1,), weights=(0.1,), losses=(1 / 3,), loss=1 / 3
        )
        for s in (1, 2)
    ]
    raw = ledger.encode_lines(entries)
    assert ledger.decode_lines(raw) == entries
    assert ledger.decode_lines(b"") == []


# --- environment

AGENT = env.AgentEnv(
    job="ns/j", job_uid="u", slot=1, attempt=2, token="t", pod_ip="127.0.0.1", workers=2,
    uri="s3://b/p", run="ns/j", memory="/m", hang_seconds=1.5,
)  # fmt: skip


def test_the_agents_environment() -> None:
    variables = AGENT.to_env()
    assert env.AgentEnv.from_env(variables | {"PATH": "/bin"}) == AGENT
    assert variables["EVERSTEP_HANG_SECONDS"] == "1.5"
    assert env.in_cluster(variables)
    assert not env.in_cluster({})


def test_a_missing_variable_is_named() -> None:
    variables = AGENT.to_env()
    del variables["EVERSTEP_SLOT"]
    with pytest.raises(env.EnvError, match="EVERSTEP_SLOT is not set; the operator sets it"):
        env.AgentEnv.from_env(variables)


def test_a_variable_of_the_wrong_kind_is_named_with_its_value() -> None:
    with pytest.raises(env.EnvError, match="EVERSTEP_PORT='high': expected int"):
        env.AgentEnv.from_env(AGENT.to_env() | {"EVERSTEP_PORT": "high"})


def test_how_ranks_form_units_is_told_as_text() -> None:
    variables = AGENT.to_env()
    assert variables["EVERSTEP_MESH"] == "shard=1"
    del variables["EVERSTEP_MESH"]
    assert env.AgentEnv.from_env(variables).mesh == ONE_RANK, "an older operator sets no mesh"
    found = env.AgentEnv.from_env(variables | {"EVERSTEP_MESH": "shard=2,tensor=3"})
    assert found.mesh == Mesh(shard=2, tensor=3)
    assert env.AgentEnv.from_env(found.to_env()) == found


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ("pipeline=2", "EVERSTEP_MESH='pipeline=2': pipeline: not yet"),
        (
            "shard=3",
            "EVERSTEP_MESH=shard=3: a unit has 3 ranks .* and a pod 2: one must be a multiple",
        ),
    ],
)
def test_a_mesh_that_no_pod_can_hold_is_named(mesh: str, problem: str) -> None:
    with pytest.raises(env.EnvError, match=problem):
        env.AgentEnv.from_env(AGENT.to_env() | {"EVERSTEP_MESH": mesh})


# --- exit report


def test_an_exit_report_fits_a_termination_message_whatever_happened() -> None:
    told = report.ExitReport(
        cause=report.Cause.USER_ERROR, message="é" * 5000, traceback="\n".join(f"line {i}" for i in range(5000)),
        step=7,
    )  # fmt: skip
    raw = report.encode(told)
    assert len(raw) <= report.LIMIT_BYTES
    back = report.decode(raw)
    assert back is not None
    assert (back.cause, back.step) == (told.cause, 7)


def test_of_a_traceback_in_another_script_as_much_as_fits_stays() -> None:
    found = report.ExitReport(
        cause=report.Cause.USER_ERROR, message="m", traceback="模型" * 4000 + "\nValueError: end"
    )
    raw = report.encode(found)
    assert report.LIMIT_BYTES - 24 < len(raw) <= report.LIMIT_BYTES
    back = report.decode(raw)
    assert back is not None
    assert back.traceback.endswith("模型\nValueError: end")


def test_the_end_of_a_long_traceback_is_what_stays() -> None:
    told = report.ExitReport(
        cause=report.Cause.USER_ERROR, message="m", traceback="x" * 9000 + "ValueError: here"
    )
    back = report.decode(report.encode(told))
    assert back is not None
    assert back.message == "m"
    assert back.traceback.endswith("ValueError: here")


def test_somebody_elses_termination_message_is_not_ours() -> None:
    assert report.decode("OOMKilled") is None
    assert report.decode("{}") is None


@pytest.mark.parametrize("cause", report.Cause)
def test_an_end_for_good_exits_zero_so_that_nobody_starts_it_again(cause: report.Cause) -> None:
    code = report.ExitReport(cause=cause, message="").exit_code()
    assert (code == 0) == (cause in report.FOR_GOOD)


# --- names


def test_a_pods_name_is_computed() -> None:
    assert names.pod_name("byte-lm", 2, 1) == "byte-lm-2-1"


# --- manifest

CHUNK = manifest.Chunk(digest="d" * 64, key="chunks/t/d", bytes=24)
PIECE = manifest.Piece(offsets=(0, 0), lengths=(2, 3), chunk=CHUNK.digest, at=0)
TENSOR = manifest.Tensor(name="w", dtype="float32", shape=(2, 3), pieces=(PIECE,))


def document(**changes: Any) -> bytes:
    whole = manifest.Manifest(
        run="r", epoch=1, step=2, writer="t", world=1, tensors=(TENSOR,), chunks=(CHUNK,),
        state={"w": {"$tensor": "w"}, "lr": 0.1},
        ledger=(manifest.LedgerSegment(epoch=1, first=1, last=2, chunk=CHUNK.digest),),
    )  # fmt: skip
    return codec.dumps(codec.encode(whole) | codec.encode(changes))


def test_a_manifest() -> None:
    found = manifest.decode(document())
    assert codec.dumps(found) == document()
    assert found.bytes() == 24


def tensor(**changes: Any) -> dict[str, Any]:
    return {"tensors": [codec.encode(TENSOR) | changes]}


def piece(**changes: Any) -> dict[str, Any]:
    return tensor(pieces=[codec.encode(PIECE) | changes])


def chunk(**changes: Any) -> dict[str, Any]:
    return {"chunks": [codec.encode(CHUNK) | changes]}


def half(row: int) -> dict[str, Any]:
    return codec.encode(PIECE) | {"offsets": [row, 0], "lengths": [1, 3]}


def nested(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version 2; this reader knows 1"),
        ({"features": ["zstd"]}, "needs features that this reader lacks: zstd"),
        (chunk(key="../../etc/passwd"), "'../../etc/passwd'"),
        (chunk(key="/etc/passwd"), "'/etc/passwd'"),
        (chunk(key="chunks/../log/000000000000.json"), "has the key"),
        (chunk(key="log/000000000000.json"), "has the key"),
        (chunk(key="chunks/a\x00b"), "has the key"),
        (chunk(digest="../../../etc/passwd"), "has the digest '../../../etc/passwd'"),
        (chunk(digest=""), "has the digest ''"),
        (chunk(bytes=-1), "has -1 bytes"),
        (chunk(bytes=23), "outside its chunk"),
        (chunk(digest="e" * 64), "outside its chunk"),
        (tensor(dtype="object"), "unknown dtype 'object'"),
        (tensor(shape=[-2, 3]), "negative shape"),
        (tensor(shape=[2, 10**18]), "cover 24 bytes of"),
        (tensor(pieces=[]), "cover 0 bytes of 24"),
        (piece(lengths=[2, 4]), "outside the shape"),
        (piece(lengths=[10**18, 10**18]), "outside the shape"),
        (piece(offsets=[-1, 0]), "outside the shape"),
        (piece(offsets=[0]), "outside the shape"),
        (piece(at=-4), "outside its chunk"),
        (piece(at=4), "outside its chunk"),
        ({"ledger": [{"epoch": 1, "first": 1, "last": 2, "chunk": "f"}]}, "ledger chunk f is not"),
        ({"tensors": "many"}, "Manifest.tensors: expected a list"),
        ({"tensors": [TENSOR, TENSOR]}, "tensor w is listed twice"),
        (tensor(pieces=[half(0), half(0)]), "two pieces hold (0, 0)"),
        ({"version": "2.0", "tensors": "another way"}, "version '2.0'; this reader knows 1"),
        ({"step": "²"}, "Manifest.step: expected int"),
        ({"step": "--5"}, "Manifest.step: expected int"),
        ({"step": "9" * 5000}, "Manifest.step: expected int"),
        ({"state": nested(101)}, "nested deeper than 100 levels"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(codec.DecodeError) as caught:
        manifest.decode(document(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_compared_with_few_others_whatever_dimension_divides_them(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """Each agent and worker reads the manifest, with a piece of each tensor for each rank that shards it."""
    count, compared, compare = 100, list[int](), manifest._overlap

    def note(one: manifest.Piece, other: manifest.Piece) -> bool:
        compared.append(1)
        return compare(one, other)

    def lay(at: int) -> manifest.Piece:
        offsets = (at, 0) if dim == 0 else (0, at)
        lengths = (1, count) if dim == 0 else (count, 1)
        return manifest.Piece(offsets=offsets, lengths=lengths, chunk="c", at=0)

    monkeypatch.setattr(manifest, "_overlap", note)
    pieces = tuple(map(lay, range(count)))
    shape = (count, count)
    whole = manifest.Tensor(name="w", dtype="uint8", shape=shape, pieces=pieces)
    assert manifest._find_overlap(whole) is None
    assert len(compared) < count
    twice = manifest.Tensor(name="w", dtype="uint8", shape=shape, pieces=(lay(7), *pieces))
    assert manifest._find_overlap(twice) == lay(7).offsets


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_document_that_is_nested_without_end_is_refused_not_followed(opening: str) -> None:
    raw = opening * 200_000
    for read in (manifest.decode, log.decode, lambda text: codec.loads(levels.Seen, text)):
        with pytest.raises(codec.DecodeError, match="not JSON"):
            read(raw.encode())


def test_a_state_as_deep_as_allowed_is_read() -> None:
    assert manifest.decode(document(state=nested(100))).state == nested(100)
