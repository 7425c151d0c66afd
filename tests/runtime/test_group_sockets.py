"""Which sockets are a group's, and what a forked child does with them."""

import gc
import os
import select
import signal
import socket
from typing import Any

import pytest
import torch

from everstep import forming, group_sockets
from runtime.test_forming import two_ranks


def test_a_socket_that_got_the_number_of_a_closed_one_is_new() -> None:
    before = {4: "socket:[1]", 5: "socket:[2]"}
    after = {4: "socket:[1]", 5: "socket:[3]", 6: "socket:[4]"}
    assert group_sockets.list_new(before, after) == {5: "socket:[3]", 6: "socket:[4]"}


def test_a_connection_to_a_data_worker_that_started_meanwhile_is_not_the_groups() -> None:
    ours, theirs = socket.socketpair()
    ours.set_inheritable(True)  # as gloo's are
    with ours, theirs:
        assert group_sockets.own({ours.fileno(): group_sockets.identify(ours.fileno())}) == []
        ours.send(b"!")
        assert theirs.recv(1) == b"!"
    group_sockets.copies.clear()


def test_a_socket_for_datagrams_is_not_the_groups() -> None:
    """Its bytes cannot be counted, so a group with it would never be found stuck."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as metrics:
        metrics.set_inheritable(True)
        assert group_sockets.own({metrics.fileno(): group_sockets.identify(metrics.fileno())}) == []
    group_sockets.copies.clear()


def test_a_connection_that_the_script_opens_meanwhile_is_not_the_groups() -> None:
    before = group_sockets.open_sockets()
    ours, theirs = a_connection()
    with ours, theirs:
        ranks = two_ranks()
        found = group_sockets.list_new(before, group_sockets.open_sockets())
        taken = group_sockets.own(found)
        assert len(taken) == 2, "the ranks' ends of the connection between them"
        for one in taken:
            group_sockets.shut_down(one)
        assert not ranks[0].wait([ranks[0].all_reduce(torch.ones(1))])
        ours.sendall(b"!")
        assert theirs.recv(1) == b"!"
        assert ours.fileno() in found
        assert ours.fileno() not in group_sockets.copies, "forked children would close it"
    for one in taken:
        one.close()
    group_sockets.copies.clear()


def test_a_default_timeout_of_the_script_leaves_the_groups_connections_as_they_are() -> None:
    ours, theirs = a_connection()
    ours.set_inheritable(True)  # as gloo's are
    with ours, theirs:
        socket.setdefaulttimeout(5.0)
        try:
            taken = group_sockets.own({ours.fileno(): group_sockets.identify(ours.fileno())})
        finally:
            socket.setdefaulttimeout(None)
        assert len(taken) == 1
        assert os.get_blocking(ours.fileno())
        taken[0].close()
    group_sockets.copies.clear()


def test_gloos_connections_have_a_time_limit_that_the_scripts_have_not() -> None:
    """So they are the group's even if a later gloo closes its sockets on exec."""
    before = group_sockets.open_sockets()
    ours, theirs = a_connection()
    with ours, theirs:
        ranks = two_ranks()
        found = group_sockets.list_new(before, group_sockets.open_sockets())
        for number in found:
            os.set_inheritable(number, False)
        taken = group_sockets.own(found)
        assert len(taken) == 2, "the ranks' ends of the connection between them"
    for one in taken:
        one.close()
    del ranks
    group_sockets.copies.clear()


def a_connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_a_forked_child_closes_the_groups_sockets_and_nothing_that_has_got_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, former = socket.socketpair(), socket.socketpair()
    names = {s.fileno(): group_sockets.identify(s.fileno()) for s in (ours[0], former[0])}
    number = former[0].fileno()
    former[0].close()
    with open("/dev/null") as file:
        assert file.fileno() == number, "the new file must get the number of the closed socket"
        monkeypatch.setattr(group_sockets, "copies", names)
        pid = os.fork()
        if pid == 0:
            kept = group_sockets.identify(number) == "/dev/null"
            closed = group_sockets.identify(ours[0].fileno()) == ""
            os._exit(0 if kept and closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for one in (*ours, former[1]):
        one.close()


def test_a_forked_child_also_closes_the_sockets_of_two_ranks_that_hand_over_state() -> None:
    before = group_sockets.open_sockets()
    ranks = two_ranks()
    found = group_sockets.list_new(before, group_sockets.open_sockets())
    assert len(found) >= 2
    assert found.items() <= group_sockets.copies.items()
    del ranks
    group_sockets.copies.clear()


def test_a_collection_in_a_forked_child_does_not_wait_for_the_threads_of_its_parents_group() -> (
    None
):
    """An error that a script catches can keep a group in a reference cycle. Then the script starts data workers."""
    cycle: list[Any] = [
        torch.distributed.ProcessGroupGloo(
            torch.distributed.HashStore(), 0, 1, forming.make_options(None)
        )
    ]
    cycle.append(cycle)
    del cycle
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    child = os.pidfd_open(pid)
    ended = select.select([child], [], [], 10)[0]
    os.close(child)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    gc.collect()
    assert ended, "the child hangs in gloo's destructor"
