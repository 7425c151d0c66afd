"""How a rank waits: its own time limit is not a failure, and a cut ends every wait."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from everstep import forming
from everstep import group as groups
from everstep.errors import Misuse
from everstep.group import TorchGroup
from everstep.last_sum import OF_STEP
from everstep.mesh import Listener
from runtime.test_transfer import Keys


class Operation:
    """A gloo operation that completes when the test says so. All its errors look alike."""

    def __init__(self, complete_after: int | None, fails: bool = False) -> None:
        self.left, self.fails = complete_after, fails

    def is_completed(self) -> bool:
        return self.left == 0

    def wait(self, limit: timedelta) -> None:
        if self.left is None:
            time.sleep(0.001)
            raise RuntimeError("Operation timed out!")
        if self.left > 0:
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def group() -> TorchGroup:
    return TorchGroup(0, 1, (), None)


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_an_operation_that_completes_just_after_a_limit_has_not_failed(
    group: TorchGroup, waits: int
) -> None:
    assert group.wait([Operation(complete_after=waits)])


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_an_operation_that_failed_is_found_out(group: TorchGroup, waits: int) -> None:
    assert not group.wait([Operation(complete_after=0), Operation(waits, fails=True)])


def test_an_operation_that_never_returns_is_abandoned_after_a_cut(group: TorchGroup) -> None:
    group.cut()
    began = time.monotonic()
    assert not group.wait([Operation(complete_after=None)])
    assert group.abandoned
    assert time.monotonic() - began < 5


def test_before_a_sum_is_given_up_the_buckets_that_were_launched_have_returned(
    group: TorchGroup,
) -> None:
    launched = Operation(complete_after=2, fails=True)
    group.cut()
    assert group.start_last([launched, None], torch.zeros(1)) is None
    assert launched.left == 0, "it may still write into memory that the next sum uses"
    assert not group.abandoned


def test_a_bucket_that_does_not_return_is_abandoned_also_before_the_last_sum(
    group: TorchGroup,
) -> None:
    group.cut()
    assert group.start_last([Operation(complete_after=None), None], torch.zeros(1)) is None
    assert group.abandoned


def test_behind_an_abandoned_operation_no_other_is_waited_for(group: TorchGroup) -> None:
    hangs, behind = Operation(complete_after=None), Operation(complete_after=3)
    group.cut()
    assert group.start_last([hangs, behind, None], torch.zeros(1)) is None
    assert group.abandoned
    assert behind.left == 3, "each wait would take up to 0.1 s, for each of many buckets"


class DeviceOperation:
    """An operation of NCCL. It fails if a wait for it has a time limit."""

    def __init__(self, complete_after: int | None) -> None:
        self.left, self.ordered = complete_after, False

    def is_completed(self) -> bool:
        if self.left:
            self.left -= 1
        return self.left == 0

    def wait(self, *limits: timedelta) -> None:
        assert not limits
        self.ordered = True


class DeviceGroup:
    """The part of torch's group over NCCL that these tests need."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS) -> None:
        self.error, self.aborted = error, threading.Event()

    def _get_backend(self, device: torch.device) -> "DeviceGroup":
        assert device.type == "cuda"
        return self

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def over_nccl(group: TorchGroup) -> TorchGroup:
    group._group, group._over_nccl = DeviceGroup(), True
    return group


def test_over_nccl_a_slow_operation_is_waited_for_without_a_limit(over_nccl: TorchGroup) -> None:
    operation = DeviceOperation(complete_after=700)  # longer than LOOK
    assert over_nccl.wait([groups._OnDevice(operation, over_nccl._group)])
    assert operation.ordered
    assert not over_nccl._group.aborted.is_set()


def test_over_nccl_a_cut_ends_the_wait_and_aborts_the_group(over_nccl: TorchGroup) -> None:
    threading.Timer(0.05, over_nccl.cut).start()
    assert not over_nccl.wait(
        [groups._OnDevice(DeviceOperation(complete_after=None), over_nccl._group)]
    )
    assert over_nccl._group.aborted.wait(20)
    over_nccl.wait_cut()
    assert not over_nccl.abandoned, "the device no longer uses the memory"


def test_over_nccl_what_an_abort_completes_does_not_count(over_nccl: TorchGroup) -> None:
    over_nccl.cut()
    assert not over_nccl.wait(
        [groups._OnDevice(DeviceOperation(complete_after=1), over_nccl._group)]
    )


@pytest.mark.parametrize("error", [ErrorType.TIMEOUT, ErrorType.COMM_ERROR, ErrorType.REMOTE_ERROR])
def test_over_nccl_a_sum_of_a_failed_group_does_not_count(
    over_nccl: TorchGroup, error: ErrorType
) -> None:
    over_nccl._group.error = error
    operation = DeviceOperation(complete_after=1)
    assert not over_nccl.wait([groups._OnDevice(operation, over_nccl._group)])
    assert not operation.ordered


class LateError(DeviceOperation):
    """An operation that is complete because NCCL has failed, which only its `wait` shows."""

    def wait(self, *limits: timedelta) -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")


def test_over_nccl_an_error_that_only_the_operation_knows_is_found(over_nccl: TorchGroup) -> None:
    assert not over_nccl.wait([groups._OnDevice(LateError(complete_after=1), over_nccl._group)])


def test_to_drop_a_group_waits_for_no_operation(group: TorchGroup) -> None:
    keys = Keys()
    with ThreadPoolExecutor(2) as both:
        formed = [both.submit(forming.form_pair, keys, epoch=1, key="k", rank=r) for r in (0, 1)]
        ours, other = (f.result(timeout=60)._made for f in formed)
    group._group = ours
    group._group.allreduce([torch.ones(1)])
    del ours, formed
    group.drop()
    [ending] = [t for t in threading.enumerate() if t.name == "everstep-group-end"]
    assert ending.is_alive(), "it must wait for the operation, which waits for the other rank"
    other.allreduce([torch.ones(1)]).wait()
    ending.join(timeout=60)
    assert not ending.is_alive()


@pytest.fixture(params=["direct", "queued"])
def ranks(request: pytest.FixtureRequest) -> list[TorchGroup]:
    """Three ranks of one group over gloo, in this process."""
    keys = torch.distributed.HashStore()
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    entries = [listener.entry for listener in listeners]

    def make(rank: int) -> TorchGroup:
        made = TorchGroup(rank, 3, (), None)
        mesh = listeners[rank].connect(rank, entries, 60)
        made.mesh = mesh if request.param == "direct" else None
        made._group = torch.distributed.ProcessGroupGloo(keys, rank, 3, forming.make_options(None))
        return made

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(make, range(3)))


def test_a_last_sum_is_complete_only_when_every_rank_has_all_sums(ranks: list[TorchGroup]) -> None:
    buckets = [torch.full((100_000,), float(rank)) for rank in range(3)]
    numbers = [torch.arange(5, dtype=torch.float64) * 10**rank for rank in range(3)]

    def launch(rank: int) -> object:
        return ranks[rank].start_last([ranks[rank].all_reduce(buckets[rank])], numbers[rank])

    lasts = [launch(0), launch(1)]
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(ranks[r].end_last, lasts[r]) for r in range(2)]
        time.sleep(2 * groups.LOOK.total_seconds())
        assert not any(end.done() for end in ends), (
            "an operation ended before rank 2 launched its own"
        )
        found = [ranks[2].end_last(launch(2)), *(end.result(10) for end in ends)]
    for bucket, total in zip(buckets, found, strict=True):
        assert torch.equal(bucket, torch.full((100_000,), 3.0))
        assert total is not None
        assert torch.equal(total, torch.arange(5, dtype=torch.float64) * 111)
    assert torch.equal(numbers[1], torch.arange(5, dtype=torch.float64) * 10), (
        "the numbers must stay as they were, because they may be sent again"
    )


class Failed:
    """A bucket's sum that gloo abandons when `end` is called."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[object] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[object]:
        return self._future

    def end(self) -> None:
        self._future.set_exception(RuntimeError("Connection closed by peer"))  # type: ignore[no-untyped-call]

    def is_completed(self) -> bool:
        return True

    def wait(self, limit: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


def test_no_rank_has_the_last_sum_if_a_sum_before_it_failed_on_one(ranks: list[TorchGroup]) -> None:
    failed = Failed()
    lasts = []
    for rank, one in enumerate(ranks):
        works = [one.all_reduce(torch.ones(1000))] + ([failed] if rank == 1 else [])
        lasts.append(one.start_last(works, torch.ones(2, dtype=torch.float64)))
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(r.end_last, last) for r, last in zip(ranks, lasts, strict=True)]
        failed.end()
        assert [end.result(10) for end in ends] == [None, None, None]
    assert [last is not None and last.own for last in lasts] == [True, False, True]
    assert ranks[1]._cut_at is not None


def test_the_last_sum_of_different_numbers_says_so(ranks: list[TorchGroup]) -> None:
    if ranks[0].mesh is None:
        pytest.skip("gloo does not compare sizes")
    with ThreadPoolExecutor(3) as threads:
        lasts = [r.start_last([], torch.ones(2 + r.rank, dtype=torch.float64)) for r in ranks]
        ends = [threads.submit(r.end_last, last) for r, last in zip(ranks, lasts, strict=True)]
        for end in ends:
            with pytest.raises(
                Misuse, match=r"by rank: \{0: 2, 1: 3, 2: 4\}\); all ranks must train"
            ):
                end.result(10)


def test_a_sum_of_the_script(ranks: list[TorchGroup]) -> None:
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            numbers = [torch.tensor([1.0, 10.0], dtype=torch.float64) * r.rank for r in ranks]
            sums = threads.map(TorchGroup.add_up, ranks, numbers)
            assert [total.tolist() for total in sums if total is not None] == [[3.0, 30.0]] * 3


def test_a_sum_of_the_script_waits_until_that_of_the_step_is_sent(
    ranks: list[TorchGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's thread sends that one, and may be slow."""
    if ranks[0].mesh is None:
        pytest.skip("gloo has one queue")
    begun, may_send, send = threading.Event(), threading.Event(), ranks[0].mesh.send

    def send_late(body: bytes) -> None:
        if body.startswith(OF_STEP):
            begun.set()
            assert may_send.wait(10)
        send(body)

    monkeypatch.setattr(ranks[0].mesh, "send", send_late)
    numbers = torch.ones(1, dtype=torch.float64)
    with ThreadPoolExecutor(5) as threads:
        lasts = [threads.submit(r.start_last, [], numbers) for r in ranks]
        assert begun.wait(10)
        assert ranks[0].mesh.receive() is not None
        late = threads.submit(ranks[0].add_up, numbers * 2)
        time.sleep(0.01)
        may_send.set()
        try:
            for one, last in zip(ranks[1:], lasts[1:], strict=True):
                assert one.end_last(last.result(10)).tolist() == [3.0]
            sums = [*threads.map(lambda r: r.add_up(numbers * 2), ranks[1:]), late.result(10)]
        finally:
            for one in ranks:
                one.cut()
        assert [total.tolist() for total in sums if total is not None] == [[6.0]] * 3


def test_a_sum_of_the_script_on_one_rank_while_others_end_a_step(ranks: list[TorchGroup]) -> None:
    """The others' buckets are never complete, because one rank has launched none."""
    if ranks[0].mesh is None:
        pytest.skip("gloo does not compare what is summed")
    numbers = torch.ones(2, dtype=torch.float64)
    with ThreadPoolExecutor(3) as threads:
        alone = threads.submit(ranks[0].add_up, numbers)
        lasts = [r.start_last([r.all_reduce(torch.ones(1000))], numbers) for r in ranks[1:]]
        ends = [threads.submit(r.end_last, last) for r, last in zip(ranks[1:], lasts, strict=True)]
        for rank, end in enumerate(ends, 1):
            told = f"rank 0 is in job.sum, and rank {rank} sums the gradients of a step"
            with pytest.raises(Misuse, match=told):
                end.result(10)
        for one in ranks:
            one.cut()
        assert alone.result(10) is None


def test_a_sum_of_the_script_on_one_rank_after_the_end_of_others(ranks: list[TorchGroup]) -> None:
    if ranks[0].mesh is None:
        pytest.skip("nobody is told")
    for one in ranks[1:]:
        one.tell_end()
    with pytest.raises(
        Misuse, match=r"rank 0 is in job\.sum, and the script of rank [12] has ended"
    ):
        ranks[0].add_up(torch.ones(1, dtype=torch.float64))


def test_a_sum_of_the_script_of_different_numbers_says_so(ranks: list[TorchGroup]) -> None:
    if ranks[0].mesh is None:
        pytest.skip("gloo does not compare sizes")
    with ThreadPoolExecutor(3) as threads:
        sums = [threads.submit(r.add_up, torch.ones(1 + r.rank % 2).double()) for r in ranks]
        for one in sums:
            with pytest.raises(Misuse, match=r"by rank: \{0: 1, 1: 2, 2: 1\}"):
                one.result(10)


def test_a_group_that_was_left_closes_its_sockets_at_once(ranks: list[TorchGroup]) -> None:
    """With 64 ranks, groups that wait for a garbage collection would soon hold every descriptor."""

    def use(rank: int) -> None:
        made, numbers = ranks[rank], torch.ones(3, dtype=torch.float64)
        last = made.start_last([made.all_reduce(torch.ones(4))], numbers)
        assert made.end_last(last) is not None
        last = made.start_last([], numbers) if rank else None  # rank 0 is lost
        made.cut()
        assert made.end_last(last) is None

    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(use, range(3)))
        left = [weakref.ref(made) for made in ranks]
        for made in ranks:
            made.drop()
        del made
        ranks.clear()
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()
        for ending in threading.enumerate():
            if ending.name == "everstep-group-end":
                ending.join(timeout=60)
